"""The record of a format: flags, tables and lazy methods.

A format is a subclass that states its differences from the defaults. Its import is cheap: methods import the code of the format
when they are called. Other rooms ask for a flag of this record, never for a format's name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

    from ucpl.extents import StoredTensor, Structure
    from ucpl.files.checkpoint import Checkpoint, Framework, Order
    from ucpl.files.model_texts import WrittenTexts
    from ucpl.inference.parallel import Base, Extended
    from ucpl.language import nodes
    from ucpl.layout import Layout
    from ucpl.texts import Json

__all__ = ["Format", "degree_of"]


def degree_of(settings: Mapping[str, object], name: str) -> int:
    """A degree among settings; 1 if they have none."""
    value = settings.get(name)
    return value if isinstance(value, int) and value > 0 else 1


class Format:
    """A format of checkpoints. An instance has no state."""

    name: ClassVar[str] = ""
    """As `framework NAME(...)` of a layout calls it. The format without a name is that of layouts that name none."""
    title: ClassVar[str] = ""
    """For messages, as an object of the sentence: "DeepSpeed's files", "a universal folder"."""
    place: ClassVar[int] = 50
    """Position among the formats: a lower number looks at a path first."""
    layouts: ClassVar[tuple[str, ...]] = ()
    """Layouts of any model that ship for it."""
    other_names: ClassVar[tuple[str, ...]] = ()
    """Other words that people write for its name."""
    hints: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(word that people write for a layout, sentence with the layouts that exist), ..."""

    # ---- statements of layouts --------------------------------------------------------------------------------------------
    settings: ClassVar[tuple[str, ...]] = ()
    """Arguments of its `framework` statement."""
    forms: ClassVar[tuple[str, ...]] = ()
    """Forms of files that it reads and writes; none: any."""
    file_marks: ClassVar[tuple[str, ...]] = ()
    """Every file that it reads has one of these in its name; none: any name."""
    file_names: ClassVar[str] = ""
    """The names to write, for messages about `file_marks`."""
    has_chunks: ClassVar[bool] = False
    """Files of form dcp, with chunks that are found by their first position."""

    has_own_files: ClassVar[bool] = False
    """Its store distributes tensors over files: those that a layout names are not those of a folder."""

    # ---- contents of the files ---------------------------------------------------------------------------------------------
    has_optimizer: ClassVar[bool] = False
    """Groups and states of an optimizer."""

    kept_values: ClassVar[frozenset[str] | None] = None
    """Values of a run that its files have a place for; None: all of any run."""
    has_client_state: ClassVar[bool] = False
    """Values of the caller next to the model (client_state)."""
    has_plan_groups: ClassVar[bool] = False
    """Its groups are those of the plan; other formats deal parameters to groups by a rule of their own."""
    remade_hypers: ClassVar[tuple[str, ...]] = ()
    """Values of a group that the degrees of a job state: its writer makes them anew."""
    has_groups_alone: ClassVar[bool] = False
    """Groups of an optimizer that keeps nothing else."""
    has_groups_of_weights: ClassVar[bool] = False
    """Groups also where no parameter has a state."""
    guesses_buffers: ClassVar[bool] = False
    """A buffer and a frozen parameter look the same in its files: names and shapes decide, as far as they can."""
    has_model_files: ClassVar[bool] = False
    """It is a model's own folder: config.json, tokenizer and code, weights under the names of a class, no run."""
    has_names_of_modules: ClassVar[bool] = False
    """A job loads it by the names of its own modules."""
    has_engine: ClassVar[bool] = False
    """An engine wraps the optimizer: it holds parameters in the order of registration, ties once, and flags of the dtype."""
    omits_empty_states: ClassVar[bool] = False
    """Its files have no states and no group of parameters without elements, which its optimizer may train."""
    has_training_dtype: ClassVar[bool] = False
    """The dtypes of weights and masters alone state in which dtype the run trains."""
    masters_are_weights: ClassVar[bool] = False
    """A job trains f32 weights, cast in each forward pass: weights of a target are the masters of the source."""
    is_of_any_ranks: ClassVar[bool] = False
    """Any number of ranks loads it; it states none."""
    own_settings: ClassVar[frozenset[str]] = frozenset()
    """Settings that a target of another format does not take over."""
    chosen_settings: ClassVar[frozenset[str]] = frozenset(("file", "weights", "full"))
    """Settings that no target takes over: the name of a file, a choice of weights, a form."""
    is_of_iterations: ClassVar[bool] = False
    """Its files count the iteration that the folder's name has, too."""
    has_shifted_masters: ClassVar[bool] = False
    """Some of its releases save masters that begin after a bucket's padding."""
    shows_stored: ClassVar[bool] = False
    """A target has the stored tensors of a source, under the names in its files."""
    is_of_a_spec: ClassVar[bool] = False
    """A layout of the user alone describes its files."""
    has_layers_stacked: ClassVar[bool] = False
    """One tensor of it can have all layers, or all experts."""
    container: ClassVar[str] = ""
    """The kind of folder of a training framework whose own form of a checkpoint this is; none: other formats."""
    settings_in_container: ClassVar[Mapping[str, str]] = {}
    """Settings of a target in the folder of a training framework that finds it by fixed names."""
    file_format: ClassVar[str] = ""
    """The format under whose names its files can be opened as they are stored; none: its own."""

    def stores_chunks(self, form: str | None) -> bool:
        """True if files of this form have chunks, by key and begin."""
        return self.has_chunks and form in self.forms

    def not_inherited(self, target: Format) -> frozenset[str]:
        """Settings that a target of this format does not take over."""
        return self.chosen_settings if target is self else self.chosen_settings | self.own_settings

    reads: ClassVar[tuple[str, ...]] = ()
    """Arguments of a source's call that its reader takes. "order": an order of parameters, too."""

    # ---- code -----------------------------------------------------------------------------------------------------------
    def store(self) -> Framework:
        """The reader and writer of its files."""
        raise NotImplementedError

    weights_file: ClassVar[str] = ""
    """The file that layouts name for all weights of a model's folder."""

    def open_named(self, path: Path, names: Sequence[str]) -> Checkpoint:
        """Open the weight files of a model's folder that a layout names."""
        raise NotImplementedError

    def config_made(self, folder: Path) -> dict[str, Json] | None:
        """config.json for a folder of weights, made from its other files."""
        return None

    def texts_written(self, source: Checkpoint, targets: Sequence[StoredTensor]) -> WrittenTexts:
        """Texts of a target next to its tensors, as config.json."""
        from ucpl.files.model_texts import WrittenTexts

        return WrittenTexts()

    def config_rewritten(self, config: str, targets: Sequence[StoredTensor]) -> str:
        """config.json as it fits these tensors."""
        return config

    def renamed_at_load(self, config: Mapping[str, Json], stored: Mapping[str, tuple[int, ...]]) -> str:
        """A note on names that a loader changes, or empty.

        stored: shapes by name.
        """
        return ""

    def stored_apart(self, names: Iterable[str]) -> str:
        """A note on stored names that no module has, or empty."""
        return ""

    def in_modules(self, checkpoint: Checkpoint) -> Checkpoint:
        """A checkpoint with one tensor for each layer and expert."""
        return checkpoint

    def as_read(
        self, settings: Mapping[str, object], targets: list[StoredTensor], opened: Checkpoint
    ) -> tuple[list[StoredTensor], Checkpoint]:
        """Targets of a plan and the opened target, under the same keys."""
        return targets, opened

    def run_values(self, carried: Mapping[object, object]) -> Mapping[object, object]:
        """Values of a run without those of its degrees and files."""
        return carried

    def accumulates_wide(self, source: Checkpoint) -> bool:
        """True if its engine accumulates gradients of this source in f32."""
        return False

    def scaling_note(self, source: Checkpoint, *, is_fp16: bool) -> str:
        """A note on a target with another loss scaling."""
        return ""

    def has_layer_files(self, files: Collection[str]) -> bool:
        """True if a target has files of single layers."""
        return False

    def known_globals(self) -> frozenset[str]:
        """Classes that its files need and torch.load(weights_only=True) rejects."""
        return frozenset()

    def open(self, path: Path, order: Order | None, arguments: Mapping[str, object]) -> Checkpoint:
        """Read the headers of a checkpoint.

        order: the parameters behind an optimizer's numbers, for files that do not name them. arguments: those of the
        source's call that `reads` lists. Raises: UcplError, exit 3.
        """
        return self.store().open(path)

    def companions_of(self, root: Path) -> tuple[str, ...]:
        """Folders and files next to a training framework's companion files.

        They are in a checkpoint's root.
        """
        return ()

    def layout_name(self, settings: Mapping[str, object]) -> str:
        """The shipped layout of a checkpoint with these settings."""
        return self.layouts[0] if self.layouts else self.name

    def takes_plan_groups(self, source: Checkpoint) -> bool:
        """True if the target has the plan's groups.

        Else the writer deals parameters to groups by a rule of its own.
        """
        return self.has_plan_groups

    def describes(self, checkpoint: Checkpoint) -> bool:
        """True if `stored` gives a layout of this checkpoint.

        Else the shipped layout describes it, with the cuts of its ranks.
        """
        return False

    def stored(self, base: Base, checkpoint: Checkpoint) -> Extended:
        """The layout of a checkpoint, closer than the shipped one."""
        raise NotImplementedError

    def target(self, base: Base, source: Checkpoint | None, stored: Layout) -> Extended | None:
        """A target's layout, with the cuts that its call leaves open.

        None: the cuts of ranks, as in the source. stored: the source's layout.
        """
        return None

    def check_settings(self, settings: Mapping[str, object]) -> None:
        """Check values of a target's settings, with the format's code."""

    def needs_modules(self, settings: Mapping[str, object]) -> bool:
        """True if a target has one tensor for each layer and expert."""
        return False

    def asks_modules(self, layout: nodes.Layout, call: nodes.Call) -> bool:
        """The same of a call that is not resolved yet."""
        return self.needs_modules({})

    def registered(self, names: tuple[str, ...]) -> tuple[str, ...] | None:
        """Names in the order of registration by its own modules.

        None: it has no modules of its own.
        """
        return None

    def group_dropped(self, settings: Mapping[str, object], source: Format, *, is_listed: bool) -> str:
        """The reason for the absence of a group.

        Empty if a target has the group. source: the format that the group is from. is_listed: it has frozen parameters.
        """
        return ""

    def has_tensors_alone(self, settings: Mapping[str, object]) -> bool:
        """True if files of these settings have nothing of a run."""
        return bool(self.name) and not self.has_optimizer

    def value_dropped(self, name: str, settings: Mapping[str, object]) -> str:
        """The reason for the absence of a value of `kept_values`.

        Empty if a target has the value.
        """
        return ""

    def cuts_described(self, source: Checkpoint, structure: Structure) -> object:
        """The universal_checkpoint_info of a target.

        A format that keeps all values copies that of the source.
        """
        return source.state.blobs.get("universal_checkpoint_info") if self.kept_values is None else None

    def files_of_callers(self, settings: Mapping[str, object]) -> int:
        """Number of files with client_state for one model-parallel rank.

        0: the values of the first rank are those of all ranks.
        """
        return 0

    def has_scaler(self, settings: Mapping[str, object]) -> bool:
        """True if its files continue a run's loss scaling."""
        return False

    def job(self, source: Checkpoint, settings: Mapping[str, object]) -> str:
        """Ranks and options of a job that loads a target.

        Empty if a target is not loaded by the ranks of a job.
        """
        return ""

    def advice(self, source: Checkpoint, structure: Structure) -> tuple[str, ...]:
        """Steps of a user to load a target, besides a plain load."""
        return ()
