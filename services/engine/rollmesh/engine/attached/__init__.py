"""The backend that adapts a vLLM server which runs already. It imports neither vLLM nor torch."""
