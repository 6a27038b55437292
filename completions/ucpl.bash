# Completion of ucpl in bash, made from its own parsers.
eval "$(ucpl completion bash)"
