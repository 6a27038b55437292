# Completion of ucpl in fish, made from its own parsers.
ucpl completion fish | source
