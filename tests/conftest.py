"""The strict test session: four virtual CPU devices, no silent rank promotion, and the models every area shares.

The environment is set before anything imports jax, so child processes (servers, command lines) live by it too.
"""

import os
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEVICES = "--xla_force_host_platform_device_count"
if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    # Compiling is most of this suite's work: LLVM's optimisations would double it and change nothing that is tested.
    flags = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}=4 --xla_backend_optimization_level=0"
    if version("jaxlib").startswith("0.10."):  # XLA aborts at a flag that it does not know
        # The older emitters of fused loops take half the time to compile.
        flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = flags.strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "xla-tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import dataclasses  # noqa: E402
import gc  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import AbstractContextManager, contextmanager  # noqa: E402

import pytest  # noqa: E402

# Names of the shared base models, and the source of each under shared/fixtures.
TINY_MODELS = {
    "tiny-llama3": "tiny-llama3/hf",
    "tiny-llama3-bf16": "tiny-llama3-bf16/hf",
    "tiny-llama3-8l": "tiny-llama3-8l/hf",
    "tiny-draft": "tiny-draft/hf",
    "tiny-llama3-256-q4_k_m": "tiny-llama3-256/tiny-llama3-256-q4_k_m.gguf",
} | {
    f"tiny-llama3-gguf-{kind}": f"tiny-llama3/gguf/tiny-llama3-{kind}.gguf"
    for kind in ("f32", "bf16", "q8_0", "q4_0", "q4_1")
}


# Linux gives a process 65,530 memory mappings (vm.max_map_count). XLA maps every compiled function several times, and
# dies of a segmentation fault when none is left. One module may need half of them.
MAPPINGS_MAX = 25_000


@pytest.fixture(scope="module", autouse=True)
def _room_for_compiled_code() -> Iterator[None]:
    """Drops what earlier modules compiled before mappings run out; the persistent cache has it when asked again."""
    yield
    mappings = Path("/proc/self/maps")
    jax = sys.modules.get("jax")
    if jax and mappings.exists() and mappings.read_bytes().count(b"\n") > MAPPINGS_MAX:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of golden data that lies beside the checkout."""
    folder = ROOT.parent / "shared"
    if not (folder / "fixtures").is_dir():
        pytest.fail(f"the tests need the golden data in {folder}/fixtures: put the shared folder beside the checkout")
    return folder


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The converted SmolLM2-135M-Instruct (``JAXSPEC_DEMO_MODEL`` names another place for it)."""
    folder = Path(os.environ.get("JAXSPEC_DEMO_MODEL", ROOT / "models" / "smollm2-135m"))
    if not (folder / "manifest.json").is_file():
        pytest.fail(f"the demo model is not in {folder}: run `make demo-model`")
    return folder


@pytest.fixture(scope="session")
def tiny_models(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``tiny_models(name)``: the folder of a converted tiny model (a key of TINY_MODELS), made once per session."""
    home = tmp_path_factory.mktemp("tiny_models")

    def converted(name: str) -> Path:
        folder = home / name
        if not folder.exists():
            from checkpoints_convert.convert import convert  # here, so that other areas run without it

            convert(shared / "fixtures" / TINY_MODELS[name], folder)
        return folder

    return converted


@dataclasses.dataclass
class Compilations:
    """What XLA was asked to compile inside a ``with compilations()`` block, by function name."""

    names: list[str] = dataclasses.field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.names)


@pytest.fixture
def compilations() -> Callable[[], AbstractContextManager[Compilations]]:
    """``with compilations() as seen``: counts compilations in every thread of this process.

    The event covers an executable read from the persistent cache as well: that too would stall a request.
    """
    import jax.monitoring

    @contextmanager
    def watch() -> Iterator[Compilations]:
        seen = Compilations()

        def on_event(event: str, duration_secs: float, **details: str | int) -> None:
            if event == "/jax/core/compile/backend_compile_duration":
                seen.names.append(str(details.get("fun_name", "?")))

        jax.monitoring.register_event_duration_secs_listener(on_event)
        try:
            yield seen
        finally:
            jax.monitoring.unregister_event_duration_listener(on_event)

    return watch
