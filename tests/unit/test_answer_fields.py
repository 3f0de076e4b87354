"""Every field of vLLM's answers is in ours, or is left out on purpose."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.answer import answer_schemas as answers

# Of vLLM 0.32's types in `vllm/entrypoints`: those of whole answers and of chunks where ours has one type for both.
VLLM: dict[type[Any], str] = {
    answers.ChatCompletion: """
        choices created ec_transfer_params id kv_transfer_params metrics model object prompt_logprobs prompt_text
        prompt_token_ids service_tier system_fingerprint usage
    """,
    answers.ChatChoice: "finish_reason index logprobs message routed_experts stop_reason token_ids",
    answers.ChatAnswerMessage: "annotations audio content function_call reasoning refusal role tool_calls",
    answers.ChatCompletionChunk: """
        choices created id metrics model object prompt_text prompt_token_ids system_fingerprint usage
    """,
    answers.ChatChunkChoice: "delta finish_reason index logprobs stop_reason token_ids",
    answers.ChatDelta: "content reasoning role tool_calls",
    answers.Call: "function id type",
    answers.CalledFunction: "arguments name",
    answers.AnswerCallDelta: "function id index type",
    answers.CalledFunctionDelta: "arguments name",
    answers.ChatLogprobs: "content",
    answers.AnswerToken: "bytes logprob token top_logprobs",
    answers.TokenAlternative: "bytes logprob token",
    answers.RankedToken: "decoded_token logprob rank",
    answers.Completion: """
        choices created ec_transfer_params id kv_transfer_params metrics model object service_tier system_fingerprint
        usage
    """,
    answers.CompletionChoice: """
        finish_reason index logprobs prompt_logprobs prompt_token_ids routed_experts stop_reason text token_ids
    """,
    answers.CompletionLogprobs: "text_offset token_logprobs tokens top_logprobs",
    answers.Usage: "completion_tokens completion_tokens_details prompt_tokens prompt_tokens_details total_tokens",
    answers.PromptDetails: "cached_tokens created_cache_tokens multimodal_tokens",
    answers.CompletionDetails: "reasoning_tokens",
    answers.Error: "code message param type",
    answers.ErrorAnswer: "error",
    answers.Model: "created id max_model_len object owned_by parent permission root",
    answers.ModelList: "data object",
    answers.Tokenized: "count max_model_len token_strs tokens",
    answers.DetokenizedText: "prompt",
}
LEFT_OUT = {
    "annotations": "the model does not search the web",
    "audio": "there is nothing but text",
    "created_cache_tokens": "what is cached is not the client's to choose",
    "ec_transfer_params": "workers do not transfer by way of the client",
    "function_call": "OpenAI's former name of a call",
    "kv_transfer_params": "workers do not transfer by way of the client",
    "metrics": "`timings`, in the usage, say where the time went",
    "multimodal_tokens": "there is nothing but text",
    "parent": "there are no adapters",
    "permission": "OpenAI has it no more",
    "prompt_text": "`return_prompt_text` is refused",
    "routed_experts": "the models have no experts",
    "service_tier": "the answer does not repeat the tier",
}


@pytest.mark.parametrize("kind", VLLM, ids=lambda kind: kind.__name__)
def test_a_field_of_an_answer_is_there_or_left_out_for_a_reason(kind: Any) -> None:
    ours = kind.__required_keys__ | kind.__optional_keys__
    theirs = set(VLLM[kind].split())
    assert theirs - ours == theirs & LEFT_OUT.keys()


def test_nothing_else_is_left_out() -> None:
    assert LEFT_OUT.keys() <= {name for names in VLLM.values() for name in names.split()}
    assert all(LEFT_OUT.values())
