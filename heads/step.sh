# For the recipes: `step COMMAND ...` runs `specdec COMMAND ...`. With MINUTES=8 each recipe works for eight minutes at most
# in every command and ends with status 75 where one was not finished; the same recipe then goes on:
#   until MINUTES=8 heads/NAME/recipe.sh ...; do [ $? = 75 ] || break; done
step() {
    local said
    said=$(specdec "$@" ${MINUTES:+--max-minutes "$MINUTES"} | tee /dev/stderr)
    case $said in *"the same command goes on"*) exit 75 ;; esac
}
