# For the recipes: `step COMMAND ...` runs `specdec COMMAND ...`. With MINUTES=8 each recipe works for eight minutes at most
# in every command and ends with status 75 where one was not finished; the same recipe then goes on:
#   while MINUTES=8 heads/NAME/recipe.sh ...; [ $? = 75 ]; do :; done
step() {
    local said
    said=$(specdec "$@" ${MINUTES:+--max-minutes "$MINUTES"} | tee >(cat >&2))
    case $said in *"the same command goes on"*) exit 75 ;; esac
}

# `split ANSWERS OUT` writes into OUT held.jsonl, twelve lines evenly over the file that no stage learns from, first.jsonl,
# every third of the others, and rest.jsonl.
split() {
    awk -v n="$(wc -l < "$1")" -v out="$2" '
        BEGIN { for (k = 0; k < 12; k++) held[int(k * n / 12)] }
        { print > (out "/" ((NR - 1) in held ? "held" : (NR % 3 == 1 ? "first" : "rest")) ".jsonl") }
    ' "$1"
}
