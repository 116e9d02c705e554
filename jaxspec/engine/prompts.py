"""From a prompt to token ids that fit the context."""

from jaxspec.engine.params import Prompt
from jaxspec.errors import InvalidRequest
from jaxspec.text import Tokenizer


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None, *, vocab: int, max_len: int) -> list[int]:
    """The token ids of ``prompt``, with room for one token more in ``max_len``. Raises InvalidRequest.

    A text that cannot fit is refused by its size, before it is tokenised.
    """
    prompt.validate(vocab)
    field = "prompt_ids" if prompt.ids is not None else "chat" if prompt.chat is not None else "prompt"
    limit = max_len - 1
    at_most = f"at most {limit} tokens (max_len {max_len} - 1)"
    if prompt.ids is not None:
        ids = list(prompt.ids)
    elif tokenizer is None:
        raise InvalidRequest(field, "text", "prompt_ids: this checkpoint has no tokenizer")
    else:
        for text in (prompt.text or "", *(content for _, content in prompt.chat or ())):
            if not tokenizer.fits(text, limit):
                raise InvalidRequest(field, f"{len(text)} characters", at_most)
        if prompt.text is not None:
            ids = tokenizer.encode(prompt.text, add_bos=tokenizer.adds_bos)
        else:
            ids = tokenizer.encode_chat([{"role": role, "content": text} for role, text in prompt.chat or ()])
    if len(ids) > limit:
        raise InvalidRequest(field, f"{len(ids)} tokens", at_most)
    if not ids:
        raise InvalidRequest(field, prompt.text, "text with at least 1 token")
    return ids
