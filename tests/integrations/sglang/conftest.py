"""SGLang's modules come before those of lmdecode that need them."""

import sglang_stand_in  # noqa: F401
