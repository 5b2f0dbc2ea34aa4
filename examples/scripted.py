"""
A chat model that says what a script says: the examples run without a network and always the same.

Put any chat model of LangChain in its place; nothing else in the examples depends on it.
"""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult


class ScriptedModel(BaseChatModel):
    """Answers with the next line of its script: a text, or a tool's name and arguments."""

    script: list[str | tuple[str, dict[str, Any]]]

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **_: Any) -> "ScriptedModel":  # noqa: ARG002
        """A real model is told of its tools here."""
        return self

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,  # noqa: ARG002
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **_: Any,
    ) -> ChatResult:
        said = sum(isinstance(message, AIMessage) for message in messages)
        line = self.script[said]
        if isinstance(line, str):
            message = AIMessage(line)
        else:
            name, arguments = line
            message = AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": uuid4().hex}])
        return ChatResult(generations=[ChatGeneration(message=message)])
