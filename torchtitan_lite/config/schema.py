"""The root of the configuration."""

from torchtitan_lite.config.tables.activation_checkpoint import ActivationCheckpointConfig
from torchtitan_lite.config.tables.anomalies import AnomaliesConfig
from torchtitan_lite.config.tables.checkpoint import CheckpointConfig
from torchtitan_lite.config.tables.comm import CommConfig
from torchtitan_lite.config.tables.compile import CompileConfig
from torchtitan_lite.config.tables.debug import DebugConfig
from torchtitan_lite.config.tables.experimental import ExperimentalConfig
from torchtitan_lite.config.tables.fault_tolerance import FaultToleranceConfig
from torchtitan_lite.config.tables.job import JobConfig
from torchtitan_lite.config.tables.lora import LoRAConfig
from torchtitan_lite.config.tables.lr_scheduler import LRSchedulerConfig
from torchtitan_lite.config.tables.memory_estimation import MemoryEstimationConfig
from torchtitan_lite.config.tables.metrics import MetricsConfig
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.config.tables.optimizer import OptimizerConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.config.tables.profiling import ProfilingConfig
from torchtitan_lite.config.tables.publish import PublishConfig
from torchtitan_lite.config.tables.quantize import QuantizeConfig
from torchtitan_lite.config.tables.section import Section
from torchtitan_lite.config.tables.training import TrainingConfig
from torchtitan_lite.config.tables.validation import ValidationConfig


class Config(Section):
    """The configuration of a run."""

    job: JobConfig = JobConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    validation: ValidationConfig = ValidationConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: LRSchedulerConfig = LRSchedulerConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    activation_checkpoint: ActivationCheckpointConfig = ActivationCheckpointConfig()
    compile: CompileConfig = CompileConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    fault_tolerance: FaultToleranceConfig = FaultToleranceConfig()
    anomalies: AnomaliesConfig = AnomaliesConfig()
    publish: PublishConfig = PublishConfig()
    comm: CommConfig = CommConfig()
    metrics: MetricsConfig = MetricsConfig()
    profiling: ProfilingConfig = ProfilingConfig()
    debug: DebugConfig = DebugConfig()
    memory_estimation: MemoryEstimationConfig = MemoryEstimationConfig()
    experimental: ExperimentalConfig = ExperimentalConfig()
    quantize: QuantizeConfig = QuantizeConfig()
    lora: LoRAConfig = LoRAConfig()
