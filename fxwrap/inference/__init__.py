"""Fake values for types, and inference of the results of operators' calls."""

from fxwrap.inference.calls import CallInference as CallInference
from fxwrap.inference.calls import InferredCall as InferredCall
from fxwrap.inference.calls import InferredResult as InferredResult
from fxwrap.inference.calls import InferredTree as InferredTree
from fxwrap.inference.calls import Keywords as Keywords
from fxwrap.inference.calls import UnknownResultError as UnknownResultError
from fxwrap.inference.calls import keyword_pairs as keyword_pairs
from fxwrap.inference.calls import lists_to_tuples as lists_to_tuples
from fxwrap.inference.calls import scalar_kind as scalar_kind
from fxwrap.inference.calls import view_type as view_type
from fxwrap.inference.fake_values import ExampleValues as ExampleValues
from fxwrap.inference.fake_values import FakeCallError as FakeCallError
from fxwrap.inference.fake_values import FakeValues as FakeValues
from fxwrap.inference.fake_values import call_on_fakes as call_on_fakes
from fxwrap.inference.fake_values import explain_fake_call as explain_fake_call
