"""The options of a compile, the user's passes, and the rows of pipelines."""

from fxwrap.options.options import EMITTERS as EMITTERS
from fxwrap.options.options import FIRST_CALL as FIRST_CALL
from fxwrap.options.options import MODES as MODES
from fxwrap.options.options import PLANNERS as PLANNERS
from fxwrap.options.options import Emitter as Emitter
from fxwrap.options.options import Options as Options
from fxwrap.options.options import Step as Step
from fxwrap.options.options import enabled_steps as enabled_steps
from fxwrap.options.user_pass import FX_BEFORE_LOWERING as FX_BEFORE_LOWERING
from fxwrap.options.user_pass import FX_EMITTED as FX_EMITTED
from fxwrap.options.user_pass import IR_BEFORE_EMISSION as IR_BEFORE_EMISSION
from fxwrap.options.user_pass import IR_BEFORE_PLANNING as IR_BEFORE_PLANNING
from fxwrap.options.user_pass import PASS_POINTS as PASS_POINTS
from fxwrap.options.user_pass import Pass as Pass
from fxwrap.options.user_pass import PassPoint as PassPoint
from fxwrap.options.user_pass import empty_pass_registry as empty_pass_registry
from fxwrap.options.user_pass import register_pass as register_pass
from fxwrap.options.user_pass import registered_pass as registered_pass
