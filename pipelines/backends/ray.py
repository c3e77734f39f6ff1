"""The one door to Ray: workers as actors, gangs as Ray Train jobs. Ray starts with the first step that needs it.

A step's coordinating function runs in the driver and only waits; everything heavy is an actor or a gang that claims its
CPUs and GPUs, so that on one machine nothing heavy runs beside it. A worker that dies is replaced and its item tried again,
a bounded number of times; an error that the item itself causes (ValueError) is reported at once.
"""

import logging
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Ray starts workers at niceness 15. With two threads waiting for each other at every product, one of them losing its core
# to any other process costs both: a machine with a little other work was seen seven times slower.
os.environ.setdefault("RAY_worker_niceness", "0")

import ray

from pipelines.dag import Resources, Step
from pipelines.runner import Failed, Progress, Report, resolve

POLL_SECONDS = 0.5
_END = object()


class RayExecutor:
    """`address` None starts Ray on this machine; `auto` or ray:// joins a cluster."""

    def __init__(self, address: str | None) -> None:
        self._address = address

    def work(self, step: Step, report: Report) -> "RayWork":
        return RayWork(step.resources, report, self._address)

    def close(self) -> None:
        if ray.is_initialized():
            ray.shutdown()


@dataclass
class RayWork:
    resources: Resources
    report: Report
    address: str | None

    def _claim(self) -> tuple[int, dict[str, Any]]:
        """CPUs of a worker and the actor options that claim them. Starts or joins Ray when it is first needed."""
        if not ray.is_initialized():
            _start_or_join(self.address)
        every = max(int(node["Resources"].get("CPU", 1)) for node in ray.nodes() if node["Alive"])
        num_cpus = self.resources.num_cpus or max(int(every * self.resources.cpu_share), 1)
        # Threads are set before the process imports torch or vLLM. On a machine with other work, OMP_WAIT_POLICY=PASSIVE in
        # the environment of Ray's processes reaches every worker: a fifth slower alone, but not several times slower in company.
        env = {
            "OMP_NUM_THREADS": str(num_cpus),
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        return num_cpus, {"num_cpus": num_cpus, "num_gpus": self.resources.num_gpus, "runtime_env": {"env_vars": env}}

    def map(self, worker: str, settings: Any, items: Iterable[Any], keep_failed: bool = False) -> Iterator[Any]:
        source, has_more = iter(items), True
        again: list[tuple[Any, int]] = []
        idle: list[Any] = []
        running: dict[Any, tuple[Any, Any, int]] = {}
        options: dict[str, Any] | None = None
        try:
            while has_more or again or running:
                while len(running) < self.resources.num_workers and (again or has_more):
                    item, attempt = again.pop(0) if again else (next(source, _END), 1)
                    if item is None or item is _END:
                        has_more = item is None
                        break
                    options = options or self._claim()[1]
                    actor = idle.pop() if idle else _start(_Worker, options, worker, settings)
                    running[actor.run.remote(item)] = (actor, item, attempt)
                if not running:
                    time.sleep(POLL_SECONDS if has_more else 0.0)
                    continue
                done, _ = ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS if has_more else None)
                for reference in done:
                    actor, item, attempt = running.pop(reference)
                    try:
                        result = ray.get(reference)
                    except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
                        # The engine inside may be dead although its actor lives: always end it.
                        ray.kill(actor)
                        cause = getattr(error, "cause", None)
                        if isinstance(cause, ValueError):
                            raise cause from error
                        if attempt < self.resources.max_attempts:
                            again.insert(0, (item, attempt + 1))  # at once: an engine that cannot start must not try with every item
                        elif keep_failed and not getattr(error, "actor_init_failed", False):
                            yield Failed(item, str(error))
                        else:
                            raise RuntimeError(f"{worker} failed {attempt} times, last: {error}") from error
                    else:
                        idle.append(actor)
                        yield result
        finally:
            for actor in [*idle, *(entry[0] for entry in running.values())]:
                ray.kill(actor)

    def beside(self, resources: Resources) -> "RayWork":
        """With as many workers as fit beside this work's gang; ValueError when not one does."""
        mine, other = self.resources, replace(self, resources=resources)
        claims = {"CPU": (self._claim()[0], other._claim()[0]), "GPU": (mine.num_gpus, resources.num_gpus)}
        there, num_workers = ray.cluster_resources(), resources.num_workers
        for kind, (of_gang, of_worker) in claims.items():
            left = int(there.get(kind, 0.0)) - mine.num_workers * of_gang
            num_workers = min(num_workers, left // of_worker) if of_worker else num_workers
            if num_workers < 1:
                raise ValueError(
                    f"cluster.engine_workers: an engine takes {of_worker} {kind}s and {mine.num_workers} training workers {of_gang} each, "
                    f"the cluster has {there.get(kind, 0.0):g}. Fix: smaller cluster.cpus_per_worker or train_workers, or stage.cache_targets.mode=store"
                )
        return replace(other, resources=replace(resources, num_workers=num_workers))

    def gang(self, function: str, settings: Any) -> Any:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        num_cpus, _ = self._claim()
        mailbox = _start(_Mailbox, {"num_cpus": 0})
        resources = {"CPU": float(num_cpus)} | ({"GPU": float(self.resources.num_gpus)} if self.resources.num_gpus else {})
        loop = {
            "function": function,
            "settings": settings,
            "zero_stage": self.resources.zero_stage,
            "engine": self.resources.train_engine,
            "num_threads": num_cpus,
            "mailbox": mailbox,
        }
        with tempfile.TemporaryDirectory() as storage:
            trainer = TorchTrainer(
                _gang_member,
                train_loop_config=loop,
                torch_config=TorchConfig(backend="nccl" if self.resources.num_gpus else "gloo"),
                scaling_config=ScalingConfig(
                    num_workers=self.resources.num_workers, use_gpu=bool(self.resources.num_gpus), resources_per_worker=resources
                ),
                run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=self.resources.max_attempts - 1)),
            )
            # `fit` blocks, so it waits in a thread while this one reports what the workers send and can be interrupted.
            outcome: queue.Queue[BaseException | None] = queue.Queue()
            threading.Thread(target=_fit, args=(trainer, outcome), daemon=True).start()
            ended, result = False, None
            while not ended:
                try:
                    error = outcome.get(timeout=POLL_SECONDS)
                    ended = True
                except queue.Empty:
                    error = None
                for progress in ray.get(mailbox.take_progress.remote()):
                    self.report(progress)
                if ended and error is not None:
                    raise _root_cause(error)
            result = ray.get(mailbox.take_result.remote())
            ray.kill(mailbox)
            return result


def _start_or_join(address: str | None) -> None:
    """ray.init without its lines on the screen, keeping the driver's own answer to SIGTERM: Ray's would abort it."""
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(
        address=address,
        include_dashboard=False if address is None else None,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
    )
    signal.signal(signal.SIGTERM, handler)


def _start(kind: type, options: dict[str, Any], *arguments: Any) -> Any:
    """An actor of a class; Ray's handles have their methods only at run time."""
    return ray.remote(kind).options(**options).remote(*arguments)


class _Worker:
    """An actor around one worker object."""

    def __init__(self, worker: str, settings: Any) -> None:
        self._run = resolve(worker)(settings)

    def run(self, item: Any) -> Any:
        return self._run(item)


class _Mailbox:
    """Carries progress and the result from a gang to the driver."""

    def __init__(self) -> None:
        self._progress: list[Progress] = []
        self._result: Any = None

    def send_progress(self, progress: Progress) -> None:
        self._progress.append(progress)

    def take_progress(self) -> list[Progress]:
        taken, self._progress = self._progress, []
        return taken

    def send_result(self, result: Any) -> None:
        self._result = result

    def take_result(self) -> Any:
        return self._result


def _fit(trainer: Any, outcome: "queue.Queue[BaseException | None]") -> None:
    try:
        trainer.fit()
        outcome.put(None)
    except BaseException as error:
        outcome.put(error)


def _gang_member(loop: dict[str, Any]) -> None:
    """One process of a gang; rank 0 reports."""
    import torch

    torch.set_num_threads(loop["num_threads"])
    rank = torch.distributed.get_rank()
    mailbox = loop["mailbox"]

    def report(progress: Progress) -> None:
        if rank == 0:
            mailbox.send_progress.remote(progress)

    if loop["engine"] == "deepspeed":
        make_engine = resolve("pipelines.backends.deepspeed:engine_factory")(loop["zero_stage"])
    else:
        make_engine = resolve("dspark.training:LocalEngine")
    result = resolve(loop["function"])(loop["settings"], make_engine, report)
    if rank == 0:
        ray.get(mailbox.send_result.remote(result))


def _root_cause(error: BaseException) -> BaseException:
    """The worker's own error inside Ray Train's."""
    failures = getattr(error, "worker_failures", None) or {}
    for failure in failures.values():
        cause = getattr(failure, "cause", None) or failure
        return cause if isinstance(cause, ValueError) else RuntimeError(str(failure))
    return error
