"""The backends that adapt a server which runs already. They import neither vLLM nor torch."""
