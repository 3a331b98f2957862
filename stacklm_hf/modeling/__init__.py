"""The Stack architecture in the Hugging Face ecosystem: configuration, model, tokenizer, native import, exports.

Importing this package registers the Auto classes. It knows nothing of the rooms above but the token names.
"""
