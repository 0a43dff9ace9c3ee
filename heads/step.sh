# For the recipes: `step COMMAND ...` runs `specdec COMMAND ...`. With MINUTES=8 each recipe works for eight minutes at most
# in every command and ends with status 75 where one was not finished; the same recipe then goes on:
#   while MINUTES=8 heads/NAME/recipe.sh ...; [ $? = 75 ]; do :; done
step() {
    local said
    said=$(specdec "$@" ${MINUTES:+--max-minutes "$MINUTES"} | tee >(cat >&2))
    case $said in *"run the same command again to resume"*) exit 75 ;; esac
}
