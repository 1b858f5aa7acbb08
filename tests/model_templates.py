"""Chat templates that render as those of published models do, written anew for tests.

Each has the quirks of its model: what it refuses, what it drops, how it writes calls and thoughts.
"""

from __future__ import annotations

# The date is the template's own. Tools stand in the first question. One call in a message, without
# text beside it, and `parameters` for its arguments.
LLAMA_31 = """\
{{- bos_token -}}
{%- if not date_string is defined -%}{%- set date_string = '26 Jul 2024' -%}{%- endif -%}
{%- if not tools_in_user_message is defined -%}
{%- set tools_in_user_message = true -%}
{%- endif -%}
{%- set said = '' -%}{%- set rest = messages -%}
{%- if rest[0].role == 'system' -%}
{%- set said = rest[0].content | trim -%}{%- set rest = rest[1:] -%}
{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' -}}
{%- if tools -%}{{- 'Environment: ipython\\n' -}}{%- endif -%}
{{- 'Today Date: ' + date_string + '\\n\\n' + said + '<|eot_id|>' -}}
{%- if tools and tools_in_user_message -%}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n' -}}
{%- for tool in tools -%}{{- (tool | tojson(indent=4)) + '\\n\\n' -}}{%- endfor -%}
{{- (rest[0].content | trim) + '<|eot_id|>' -}}
{%- set rest = rest[1:] -%}
{%- endif -%}
{%- for m in rest -%}
{%- if 'tool_calls' in m -%}
{%- if m.tool_calls | length != 1 -%}{{- raise_exception('Only one call at once!') -}}{%- endif -%}
{%- set call = m.tool_calls[0].function -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name -}}
{{- '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' -}}
{%- elif m.role in ['tool', 'ipython'] -%}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' -}}
{%- if m.content is mapping or m.content is iterable -%}{{- m.content | tojson -}}
{%- else -%}{{- m.content -}}{%- endif -%}
{{- '<|eot_id|>' -}}
{%- else -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' -}}
{{- (m.content | trim) + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

# A system message of its own; neighboring results share a turn.
QWEN_25 = """\
{%- set said = 'You are a helpful assistant.' -%}
{%- if messages[0].role == 'system' -%}{%- set said = messages[0].content -%}{%- endif -%}
{{- '<|im_start|>system\\n' + said -}}
{%- if tools -%}
{{- '\\n\\n# Tools\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first)
    or (m.role == 'assistant' and not m.tool_calls) -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|im_start|>assistant' -}}
{%- if m.content -%}{{- '\\n' + m.content -}}{%- endif -%}
{%- for call in m.tool_calls -%}
{%- if call.function is defined -%}{%- set call = call.function -%}{%- endif -%}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
{{- (call.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
{{- '<|im_start|>user' -}}
{%- endif -%}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

# Thoughts before the last question are dropped; `enable_thinking: false` prompts an empty one.
QWEN_3 = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
{{- '# Tools\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- set ns = namespace(asked=messages | length - 1, seeks=true) -%}
{%- for m in messages[::-1] -%}
{%- set index = (messages | length - 1) - loop.index0 -%}
{%- if ns.seeks and m.role == 'user' and m.content is string
    and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) -%}
{%- set ns.seeks = false -%}{%- set ns.asked = index -%}
{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- set content = m.content if m.content is string else '' -%}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- elif m.role == 'assistant' -%}
{%- set thought = '' -%}
{%- if m.reasoning_content is string -%}
{%- set thought = m.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.asked and (loop.last or thought) -%}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}
{%- else -%}{{- content -}}
{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{%- if (loop.first and content) or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{%- set call = call.function or call -%}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
{{- call.arguments if call.arguments is string else call.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
{{- '<|im_start|>user' -}}
{%- endif -%}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
"""

# The system message stands before the first question, and questions and answers take turns.
GEMMA_3 = """\
{{- bos_token -}}
{%- set before, rest = '', messages -%}
{%- if messages[0].role == 'system' -%}
{%- set text = messages[0].content -%}
{%- set before = (text if text is string else text[0].text) + '\\n\\n' -%}
{%- set rest = messages[1:] -%}
{%- endif -%}
{%- for m in rest -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate user/assistant/user/...') -}}
{%- endif -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' -}}
{{- before if loop.first else '' -}}
{%- if m.content is string -%}{{- m.content | trim -}}
{%- else -%}
{%- for part in m.content if part.type == 'text' -%}{{- part.text | trim -}}{%- endfor -%}
{%- endif -%}
{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""

# Results are a part of the turn that calls, and text beside a call stands behind its result.
GEMMA_4 = """\
{{- bos_token -}}
{%- if messages[0].role in ['system', 'developer'] or tools -%}
{{- '<|turn>system\\n' -}}
{%- if messages[0].role in ['system', 'developer'] -%}{{- messages[0].content -}}{%- endif -%}
{%- for tool in tools or [] -%}
{{- '<|tool>declaration:' + tool.function.name + (tool.function.parameters | tojson) -}}
{{- '<tool|>' -}}
{%- endfor -%}
{{- '<turn|>\\n' -}}
{%- endif -%}
{%- set ns = namespace(asked=-1, open=false, ended=false) -%}
{%- for m in messages if m.role == 'user' -%}{%- set ns.asked = ns.asked + 1 -%}{%- endfor -%}
{%- set seen = namespace(users=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{%- set seen.users = seen.users + 1 -%}{%- set ns.open = false -%}
{{- '<|turn>user\\n' + (m.content | trim) + '<turn|>\\n' -}}
{%- elif m.role == 'assistant' -%}
{%- if not ns.open -%}{{- '<|turn>model\\n' -}}{%- endif -%}
{%- set ns.open = true -%}
{%- if m.reasoning_content and seen.users == ns.asked -%}
{{- '<|channel>thought\\n' + m.reasoning_content + '\\n<channel|>' -}}
{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{- '<|tool_call>call:' + call.function.name + '{' -}}
{%- for key, value in call.function.arguments | items -%}
{{- key + ':<|"|>' + (value | string) + '<|"|>' -}}
{%- if not loop.last -%}{{- ',' -}}{%- endif -%}
{%- endfor -%}
{{- '}<tool_call|>' -}}
{%- endfor -%}
{%- set results = namespace(rest=messages[loop.index0 + 1:], any=false, go=true) -%}
{%- for r in results.rest -%}
{%- if r.role != 'tool' -%}{%- set results.go = false -%}{%- endif -%}
{%- if results.go and m.tool_calls -%}
{%- set results.any = true -%}
{{- '<|tool_response>response:' + (r.name or 'unknown') + '{value:<|"|>' + r.content -}}
{{- '<|"|>}<tool_response|>' -}}
{%- endif -%}
{%- endfor -%}
{{- (m.content or '') | trim -}}
{%- if m.tool_calls and not results.any -%}{{- '<|tool_response>' -}}
{%- elif not m.tool_calls -%}{{- '<turn|>\\n' -}}{%- set ns.open = false -%}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.open -%}{{- '<|turn>model\\n' -}}{%- endif -%}
"""

# No header before an answer; ids of nine characters; tools before the last question; no system
# message means one with the day.
MISTRAL_SMALL_31 = """\
{{- bos_token -}}
{%- set said, rest = 'You are Mistral. Today is ' + strftime_now('%Y-%m-%d') + '.', messages -%}
{%- if messages[0].role == 'system' -%}
{%- set said, rest = messages[0].content, messages[1:] -%}
{%- endif -%}
{{- '[SYSTEM_PROMPT]' + said + '[/SYSTEM_PROMPT]' -}}
{%- set asked = rest | selectattr('role', 'equalto', 'user') | list -%}
{%- set turns = namespace(all=[]) -%}
{%- for m in rest if m.role not in ['tool', 'tool_results'] and not m.get('tool_calls') -%}
{%- set turns.all = turns.all + [m] -%}
{%- endfor -%}
{%- for m in turns.all -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('After the optional system message, roles must alternate') -}}
{%- endif -%}
{%- endfor -%}
{%- for m in rest -%}
{%- if m.role == 'user' -%}
{%- if tools and m == asked[-1] -%}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}
{%- endif -%}
{{- '[INST]' + m.content + '[/INST]' -}}
{%- elif m.tool_calls is defined -%}
{{- '[TOOL_CALLS] [' -}}
{%- for call in m.tool_calls -%}
{%- if call.id is not defined or call.id | length < 9 -%}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length >= 9!') -}}
{%- endif -%}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id[-9:] + '"}' -}}
{{- ', ' if not loop.last else ']' + eos_token -}}
{%- endfor -%}
{%- elif m.role == 'assistant' -%}
{{- m.content + eos_token -}}
{%- elif m.role in ['tool', 'tool_results'] -%}
{%- if m.tool_call_id is not defined or m.tool_call_id | length < 9 -%}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length >= 9!') -}}
{%- endif -%}
{{- '[TOOL_RESULTS] {"content": ' + (m.content | string) + ', "call_id": "' -}}
{{- m.tool_call_id[-9:] + '"}[/TOOL_RESULTS]' -}}
{%- else -%}{{- raise_exception('Only user and assistant roles are supported') -}}
{%- endif -%}
{%- endfor -%}
"""

# The end of text follows every conversation, and no answer.
PHI_4_MINI = """\
{%- if messages[0].role == 'system' or tools -%}
{{- '<|system|>' + (messages[0].content if messages[0].role == 'system' else '') -}}
{%- for tool in tools or [] -%}
{{- '<|tool|>' + (tool.function | tojson) + '<|/tool|>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{- '<|tool_response|>' + (m.content | tojson) + '<|end|>' -}}
{%- elif m.role != 'system' -%}
{{- '<|' + m.role + '|>' -}}
{%- if m.content -%}{{- m.content -}}{%- endif -%}
{%- for call in m.tool_calls -%}
{{- '<|tool_call|>' + (call.function | tojson) + '<|/tool_call|>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt else eos_token -}}
"""

# Arguments are text; tools are not written; the header depends on what came before; no header
# before an answer to a result.
DEEPSEEK_31 = """\
{%- if not thinking is defined -%}{%- set thinking = false -%}{%- endif -%}
{%- set ns = namespace(said='', asked=false, result=false) -%}
{%- for m in messages if m.role == 'system' -%}
{%- set ns.said = ns.said + ('\\n\\n' if ns.said else '') + m.content -%}
{%- endfor -%}
{{- bos_token + ns.said -}}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{%- set ns.asked, ns.result = true, false -%}
{{- '<|User|>' + m.content -}}
{%- elif m.role == 'assistant' -%}
{%- if ns.asked -%}{{- '<|Assistant|></think>' -}}{%- endif -%}
{%- set ns.asked = false -%}
{%- if m.tool_calls -%}
{%- set ns.result = false -%}
{%- if m.content is not none -%}{{- m.content -}}{%- endif -%}
{{- '<|calls_begin|>' -}}
{%- for call in m.tool_calls -%}
{{- '<|call_begin|>' + call.function.name + '<|sep|>' + call.function.arguments -}}
{{- '<|call_end|>' -}}
{%- endfor -%}
{{- '<|calls_end|>' + eos_token -}}
{%- else -%}
{%- set content = m.content -%}
{%- if not ns.result and '</think>' in content -%}
{%- set content = content.split('</think>', 1)[1] -%}
{%- endif -%}
{%- set ns.result = false -%}
{{- content + eos_token -}}
{%- endif -%}
{%- elif m.role == 'tool' -%}
{%- set ns.asked, ns.result = false, true -%}
{{- '<|output_begin|>' + m.content + '<|output_end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.asked and not ns.result -%}
{{- '<|Assistant|>' + ('<think>' if thinking else '</think>') -}}
{%- endif -%}
"""

# No token ends an answer: the next turn begins. Arguments are pairs of keys and values.
GLM_45 = """\
{{- '[gMASK]<sop>' -}}
{%- if tools -%}
{{- '<|system|>\\n# Tools\\n' -}}
{%- for tool in tools -%}{{- (tool | tojson(ensure_ascii=False)) + '\\n' -}}{%- endfor -%}
{%- endif -%}
{%- macro visible(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content is iterable and content is not mapping -%}
{%- for part in content -%}{{- part.text if part is mapping else part -}}{%- endfor -%}
{%- else -%}{{- content -}}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(asked=-1) -%}
{%- for m in messages if m.role == 'user' -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.asked = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{{- '<|user|>\\n' + visible(m.content) -}}
{%- if enable_thinking is defined and not enable_thinking
    and not visible(m.content).endswith('/nothink') -%}
{{- '/nothink' -}}
{%- endif -%}
{%- elif m.role == 'assistant' -%}
{%- set thought, content = '', visible(m.content) -%}
{%- if m.reasoning_content is string -%}{%- set thought = m.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|assistant|>' -}}
{%- if loop.index0 > ns.asked and thought -%}
{{- '\\n<think>' + thought.strip() + '</think>' -}}
{%- else -%}{{- '\\n<think></think>' -}}{%- endif -%}
{%- if content.strip() -%}{{- '\\n' + content.strip() -}}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{%- if call.function -%}{%- set call = call.function -%}{%- endif -%}
{{- '\\n<tool_call>' + call.name -}}
{%- for key, value in call.arguments.items() -%}
{{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' -}}
{{- (value if value is string else value | tojson(ensure_ascii=False)) + '</arg_value>' -}}
{%- endfor -%}
{{- '\\n</tool_call>' -}}
{%- endfor -%}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
{{- '<|observation|>' -}}
{%- endif -%}
{{- '\\n<tool_response>\\n' + visible(m.content) + '\\n</tool_response>' -}}
{%- elif m.role == 'system' -%}{{- '<|system|>\\n' + visible(m.content) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- '\\n<think></think>' -}}
{%- endif -%}
{%- endif -%}
"""

# A call is written by its id, which holds the name of the function.
KIMI_K2 = """\
{%- if tools -%}
{{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if loop.first and m.role != 'system' -%}
{{- '<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>' -}}
{%- endif -%}
{%- set name = m.name or m.role -%}
{%- if m.role == 'user' -%}{{- '<|im_user|>' -}}
{%- elif m.role == 'assistant' -%}{{- '<|im_assistant|>' -}}
{%- else -%}{{- '<|im_system|>' -}}{%- endif -%}
{{- name + '<|im_middle|>' -}}
{%- if m.role == 'tool' -%}{{- '## Return of ' + m.tool_call_id + '\\n' -}}{%- endif -%}
{%- if m.content is string -%}{{- m.content -}}
{%- elif m.content is not none -%}
{%- for part in m.content -%}{{- part.text -}}{%- endfor -%}
{%- endif -%}
{%- if m.role == 'assistant' and m.get('tool_calls') -%}
{{- '<|calls_begin|>' -}}
{%- for call in m.tool_calls -%}
{%- set given = call.function.arguments -%}
{{- '<|call_begin|>' + call.id + '<|call_argument_begin|>' -}}
{{- (given if given is string else given | tojson) + '<|call_end|>' -}}
{%- endfor -%}
{{- '<|calls_end|>' -}}
{%- endif -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}{%- endif -%}
"""

# Channels: a thought and a call have headers of their own, a thought before a final answer is
# dropped if another follows, and the last answer ends with a token of its own.
GPT_OSS = """\
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') -}}
{{- '\\nReasoning: ' + (reasoning_effort or 'medium') + '<|end|>' -}}
{%- set said, rest = '', messages -%}
{%- if messages[0].role in ['developer', 'system'] -%}
{%- set said, rest = messages[0].content, messages[1:] -%}
{%- endif -%}
{%- if said or tools -%}
{{- '<|start|>developer<|message|># Instructions\\n\\n' + said -}}
{%- for tool in tools or [] -%}{{- '\\ntype ' + (tool.function | tojson) -}}{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- set last = namespace(call=none) -%}
{%- for m in rest -%}
{%- if m.role == 'assistant' -%}
{%- if '<|channel|>' in (m.content or '') -%}
{{- raise_exception('Put the thought into the field thinking.') -}}
{%- endif -%}
{%- if 'tool_calls' in m -%}
{%- set later = namespace(final=false) -%}
{%- for other in rest[loop.index:] if other.role == 'assistant' and 'tool_calls' not in other -%}
{%- set later.final = true -%}
{%- endfor -%}
{%- if m.content and m.thinking -%}
{{- raise_exception('Cannot pass both content and thinking in a message with calls!') -}}
{%- elif m.content and not later.final -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' -}}
{%- elif m.thinking and not later.final -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}
{%- endif -%}
{%- set call = m.tool_calls[0].function -%}
{%- set last.call = call.name -%}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' -}}
{{- (call.arguments | tojson) + '<|call|>' -}}
{%- elif loop.last and not add_generation_prompt -%}
{%- if 'thinking' in m -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}
{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' -}}
{%- else -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' -}}
{%- set last.call = none -%}
{%- endif -%}
{%- elif m.role == 'tool' -%}
{%- if last.call is none -%}
{{- raise_exception('There was no previous call of a tool!') -}}
{%- endif -%}
{{- '<|start|>functions.' + last.call + ' to=assistant<|channel|>commentary<|message|>' -}}
{{- (m.content | tojson) + '<|end|>' -}}
{%- else -%}
{{- '<|start|>user<|message|>' + m.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""

# Two modes, in its system message; without thoughts an empty one is written before each answer.
# Tools come as variables of its own, and calls are not written.
SMOLLM_3 = """\
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set mode = '/think' if enable_thinking else '/no_think' -%}
{%- set said = messages[0].content if messages[0].role == 'system' else '' -%}
{%- set mode = '/no_think' if '/no_think' in said else mode -%}
{{- '<|im_start|>system\\n## Metadata\\n\\nToday Date: ' + strftime_now('%d %B %Y') -}}
{{- '\\nReasoning Mode: ' + mode + '\\n\\n' + said.replace('/no_think', '').rstrip() -}}
{%- if xml_tools -%}{{- '\\n### Tools\\n' + (xml_tools | tojson) -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for m in messages -%}
{%- set content = m.content if m.content is string else '' -%}
{%- if m.role == 'user' -%}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if mode == '/no_think' -%}{{- '<think>\\n\\n</think>\\n' -}}{%- endif -%}
{{- content.lstrip('\\n') + '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if mode == '/no_think' -%}{{- '<think>\\n\\n</think>\\n' -}}{%- endif -%}
{%- endif -%}
"""

# Every role has a header; calls are whatever stands in the content.
GRANITE_33 = """\
{%- set said, rest = 'You are Granite. Today is ' + strftime_now('%B %d, %Y') + '.', messages -%}
{%- if messages[0].role == 'system' -%}
{%- set said, rest = messages[0].content, messages[1:] -%}
{%- endif -%}
{%- if thinking -%}{%- set said = said + ' Think first.' -%}{%- endif -%}
{{- '<|start_of_role|>system<|end_of_role|>' + said + '<|end_of_text|>\\n' -}}
{%- if tools -%}
{{- '<|start_of_role|>available_tools<|end_of_role|>' + (tools | tojson(indent=4)) -}}
{{- '<|end_of_text|>\\n' -}}
{%- endif -%}
{%- for document in documents or [] -%}
{{- '<|start_of_role|>document<|end_of_role|>' + document.text + '<|end_of_text|>\\n' -}}
{%- endfor -%}
{%- for m in rest -%}
{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\\n' -}}
{%- if loop.last and add_generation_prompt -%}
{{- '<|start_of_role|>assistant' + (' ' + (controls | tojson) if controls else '') -}}
{{- '<|end_of_role|>' -}}
{%- endif -%}
{%- endfor -%}
"""

# No token of a turn but the end of text, and a line break only between turns.
OLMO_2 = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role in ['system', 'user'] -%}
{{- '<|' + m.role + '|>\\n' + m.content + '\\n' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|assistant|>\\n' + m.content + eos_token + ('' if loop.last else '\\n') -}}
{%- endif -%}
{%- if loop.last and add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
{%- endfor -%}
"""
