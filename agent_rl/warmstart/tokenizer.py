"""A character tokenizer of 105 tokens: nine special ones, newline, and printable ASCII."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, END = "<|endoftext|>", "<|unk|>", "<|end|>"
CONTROL = (PAD, UNKNOWN, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", END)
CALL = ("<tool_call>", "</tool_call>")
SPECIAL = (*CONTROL, *CALL)
CHARACTERS = ("\n", *map(chr, range(32, 127)))

# `tools` is not rendered: a schema spelt in characters would be longer than the episodes.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message.role + '|>' + (message.content or '') -}}
{%- for tool_call in message.tool_calls or [] -%}
{%- set call = tool_call.function or tool_call -%}
{{- '<tool_call>' + call.arguments.code + '</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


def build_tokenizer(context_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template; ids 0..8 are `SPECIAL` in order."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    # As in Qwen3, tool calls survive decoding with skip_special_tokens: engines and parsers read them there.
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in CALL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[token for token in CONTROL if token not in (PAD, UNKNOWN, END)],
        clean_up_tokenization_spaces=False,
        model_max_length=context_length,
        chat_template=CHAT_TEMPLATE,
    )
