"""The test session itself: what conftest promises to every other test."""

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache


def test_session_has_four_devices_and_refuses_rank_promotion():
    assert jax.device_count() == 4
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((3, 5)) + jnp.ones(5)


def test_compilations_are_counted_also_when_they_come_from_the_persistent_cache(compilations, tmp_path):
    def double_and_add(x):
        return x * 2 + 7

    x = jnp.zeros(11)
    settings = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in settings}
    hits = []
    jax.monitoring.register_event_listener(on_event := lambda event, **_: hits.append(event.endswith("/cache_hits")))
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        reset_cache()
        for expected_hits in (0, 1):
            jax.clear_caches()
            hits.clear()
            jitted = jax.jit(double_and_add)
            with compilations() as seen:
                jax.block_until_ready(jitted(x))
            assert (seen.names, sum(hits)) == (["jit(double_and_add)"], expected_hits)
            with compilations() as warm:
                jax.block_until_ready(jitted(x))
            assert warm.count == 0
    finally:
        jax.monitoring.unregister_event_listener(on_event)
        for name, value in before.items():
            jax.config.update(name, value)
        reset_cache()
