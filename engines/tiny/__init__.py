"""The embedded CPU engine: a Hugging Face causal language model behind SGLang's wire, for a demo or a laptop.

``server.serve`` runs it; ``python -m forebay.engines.tiny`` is the same from a shell. It needs the extra ``local``.
"""
