"""All readers that are fuzzed. A new one is a line here."""

from __future__ import annotations

from tests.fuzz import folders
from tests.fuzz.containers import HuggingFaceFolders, Pickles, Safetensors, TorchFiles
from tests.fuzz.dcp import Dcp
from tests.fuzz.imports import Imports
from tests.fuzz.plans import Plans
from tests.fuzz.reader import Reader
from tests.fuzz.said import Calls, Configs
from tests.fuzz.targets import Journals, Manifests
from tests.fuzz.texts import Texts
from tests.fuzz.vaults import Vaults

READERS: tuple[Reader, ...] = (
    Reader("pickle", Pickles.prepare),
    Reader("torch", TorchFiles.prepare),
    Reader("safetensors", Safetensors.prepare),
    Reader("huggingface", HuggingFaceFolders.prepare),
    Reader("named-files", folders.named),
    Reader("plain", folders.plain),
    Reader("deepspeed", folders.deepspeed),
    Reader("universal", folders.universal),
    Reader("writers", folders.writers),
    Reader("dcp", Dcp.prepare),
    Reader("torch-dist", Dcp.of_megatron),
    Reader("megatron-fsdp", Dcp.of_megatron_fsdp),
    Reader("megatron", folders.megatron),
    Reader("plan", Plans.prepare),
    Reader("journal", Journals.prepare),
    Reader("manifest", Manifests.prepare),
    Reader("config", Configs.prepare),
    Reader("text", Texts.prepare),
    Reader("call", Calls.prepare),
    Reader("import", Imports.prepare),
    Reader("latest", folders.latest),
    Reader("vault", Vaults.prepare),
)
