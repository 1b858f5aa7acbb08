"""Chat templates in the manner of well-known models, written for tests."""

from __future__ import annotations

LLAMA_3 = """\
{{- bos_token -}}
{%- for m in messages -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' -}}
{{- (m.content | trim) + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

MISTRAL = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('user and assistant must take turns') -}}
{%- endif -%}
{%- if m.role == 'user' -%}{{- '[INST] ' + m.content + ' [/INST]' -}}
{%- else -%}{{- ' ' + (m.content | trim) + eos_token -}}
{%- endif -%}
{%- endfor -%}
"""

GEMMA = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
{%- set role = 'model' if m.role == 'assistant' else m.role -%}
{{- '<start_of_turn>' + role + '\\n' + (m.content | trim) + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""

ZEPHYR = """\
{%- for m in messages -%}
{{- '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""

# Old reasoning is dropped, an empty one is put before the last answer, tools are known.
QWEN_3 = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
{{- '<|im_start|>system\\n# Tools\\n' -}}
{%- for tool in tools -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set thought = '' -%}{%- set said = m.content -%}
{%- if '</think>' in said -%}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last -%}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- said -}}
{%- for call in m.tool_calls or [] -%}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

# Ends conversations with a token that no turn in their middle has.
PHI_3 = """\
{%- for m in messages -%}
{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- else -%}{{- eos_token -}}{%- endif -%}
"""

# Generation begins with a thought, which answers in the data may lack.
DEEPSEEK = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token -}}
{%- else -%}{{- '<|User|>' + m.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|Assistant|><think>\\n' -}}{%- endif -%}
"""

# The last answer ends with another token than those before it, and thoughts have their place.
HARMONY = """\
{{- '<|start|>system<|message|>Valid channels: final<|end|>' -}}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content -}}
{{- '<|return|>' if loop.last else '<|end|>' -}}
{%- else -%}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""

# No token ends a turn: letters do.
PLAIN = """\
{%- for m in messages -%}
{{- ('Q: ' if m.role == 'user' else 'A: ') + m.content + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'A:' -}}{%- endif -%}
"""

# Says itself what the assistant says: here without its first word, so that nobody can guess it.
MARKED = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}
{{- m.content.split(' ')[0] -}}
{%- generation -%}{{- m.content[(m.content.split(' ')[0] | length):] + '<|im_end|>' -}}
{%- endgeneration -%}
{%- else -%}{{- m.content + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

# Counts from the end and tells the length, so that nothing around an answer stays as it is.
COUNTING_DOWN = """\
{%- for m in messages -%}
{{- (loop.revindex | string) + ' ' + (m.content | length | string) + ' ' -}}
{{- m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
"""

SPECIAL = ["<s>", "</s>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"]
"""Tokens of their own in the tokenizer that tests use."""
SPECIAL += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|end|>", "<|start|>", "<|message|>", "<|channel|>", "<|return|>"]
