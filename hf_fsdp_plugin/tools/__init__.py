"""Tools: what people run before, beside and after a training. They import the runtime, never the reverse."""
