"""Serve config files: read, and checked whole before anything starts.

Serve ignores keys it does not know, in every section; here each is an error that names its path and the nearest key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import msgspec
import yaml
from pydantic import BaseModel, ValidationError

from deployments.autoscaling import POLICY
from deployments.naming import clashes, offer
from deployments.resources import contradictions, unfit
from deployments.settings import (
    MODEL_DEPLOYMENT,
    ConfigError,
    GatewaySettings,
    ModelSettings,
    fault_lines,
    model_settings,
    nearest,
    parse,
)

if TYPE_CHECKING:
    from ray.serve.schema import ServeDeploySchema

GATEWAY_IMPORT = "deployments.app:gateway"
MODEL_IMPORT = "deployments.app:model"


class _HttpOptions(BaseModel):
    """What of Serve's `http_options` is ours too, with its defaults."""

    host: str = "0.0.0.0"
    port: int = 8000


class OurParts(msgspec.Struct, frozen=True):
    """What a config says to us. Several gateways, or none, are legal for Serve; here the first one counts."""

    gateway: GatewaySettings
    models: dict[str, ModelSettings]
    host: str
    port: int


def read(path: Path) -> dict[str, Any]:
    """The file as it stands. Raises `ConfigError` with the position of a YAML fault."""
    try:
        raw = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("applications"), list):
        raise ConfigError(f"{path}: expected a Serve config, a mapping with a list under `applications`")
    return raw


def our_parts(raw: Mapping[str, Any]) -> OurParts:
    """The args of our applications, parsed. Raises `ConfigError` with every fault of every application."""
    gateways: list[GatewaySettings] = []
    models: dict[str, ModelSettings] = {}
    faults: list[str] = []
    for index, app in enumerate(raw["applications"]):
        where = f"applications[{index}]"
        if not isinstance(app, dict):
            faults.append(f"{where}: expected a mapping, not {app!r}")
            continue
        try:
            if app.get("import_path") == GATEWAY_IMPORT:
                gateways.append(parse(GatewaySettings, app.get("args") or {}, f"{where}.args"))
            elif app.get("import_path") == MODEL_IMPORT:
                model = model_settings(app, f"{where}.")
                models[str(app.get("name", "default"))] = model
                faults.extend(unfit(model.backend, f"{where}.backend"))
                faults.extend(_contradictions(model, app, index))
        except ConfigError as error:
            faults.append(str(error))
    http = _HttpOptions()
    try:
        options = raw.get("http_options") or {}
        http = parse(_HttpOptions, options, "http_options")
    except ConfigError as error:
        faults.append(str(error))
    for clashing, name, owner in clashes({name: offer(settings) for name, settings in models.items()}):
        faults.append(f"model {clashing!r}: cannot be called {name!r} too, which model {owner!r} is called")
    if faults:
        raise ConfigError("\n".join(faults))
    return OurParts(
        gateway=gateways[0] if gateways else GatewaySettings(),
        models=models,
        host=http.host,
        port=http.port,
    )


def _contradictions(model: ModelSettings, app: Mapping[str, Any], index: int) -> Iterator[str]:
    deployments = app.get("deployments")
    for at, deployment in enumerate(deployments if isinstance(deployments, list) else []):
        if isinstance(deployment, Mapping) and deployment.get("name") == MODEL_DEPLOYMENT:
            yield from contradictions(model.backend, deployment, f"applications[{index}].deployments[{at}]")


def serve_part(raw: Mapping[str, Any]) -> ServeDeploySchema:
    """The config as Serve reads it. Raises `ConfigError` for what Serve refuses and for keys it would ignore."""
    from ray.serve.config import AutoscalingConfig  # here: importing Ray takes a second that `--local` does not need
    from ray.serve.schema import ServeDeploySchema

    faults = list(_unknown_keys(ServeDeploySchema, raw, ""))
    for app_index, app in enumerate(raw["applications"]):
        deployments = app.get("deployments") if isinstance(app, dict) else None
        for index, deployment in enumerate(deployments if isinstance(deployments, list) else []):
            autoscaling = deployment.get("autoscaling_config") if isinstance(deployment, dict) else None
            if isinstance(autoscaling, dict):
                where = f"applications[{app_index}].deployments[{index}].autoscaling_config"
                faults.extend(_unknown_keys(AutoscalingConfig, autoscaling, where))
                try:
                    AutoscalingConfig.model_validate(autoscaling)
                except ValidationError as error:
                    faults.extend(fault_lines(AutoscalingConfig, error, where))
    try:
        schema = ServeDeploySchema.model_validate(raw)
    except ValidationError as error:
        faults.extend(fault_lines(ServeDeploySchema, error, ""))
    except AttributeError:
        if not faults:
            raise
        # Serve's validators take some values for mappings unseen; what is none is among the faults.
    if faults:
        raise ConfigError("\n".join(dict.fromkeys(faults)))  # once each: some keys Serve refuses itself
    return schema


def notes(raw: Mapping[str, Any]) -> list[str]:
    """What is legal, and hardly meant: one line each."""
    found = []
    for index, app in enumerate(raw["applications"]):
        if app.get("import_path") != MODEL_IMPORT:
            continue
        for place, deployment in enumerate(app.get("deployments") or []):
            scaling = deployment.get("autoscaling_config")
            if isinstance(scaling, Mapping) and "policy" not in scaling:
                found.append(
                    f"applications[{index}].deployments[{place}].autoscaling_config: without "
                    f"`policy: {{policy_function: {POLICY}}}` Serve scales on the number of requests only"
                )
    return found


def _unknown_keys(cls: type[BaseModel], data: Any, where: str) -> Iterator[str]:
    """A line for each key of `data`, at any depth, that `cls` has no field for."""
    if not isinstance(data, Mapping):
        return
    for key, value in data.items():
        path = f"{where}.{key}" if where else str(key)
        field = cls.model_fields.get(key)
        if field is None:
            yield f"{path}: unknown key{nearest(str(key), sorted(cls.model_fields))}"
            continue
        for nested in _models_in(field.annotation):
            if isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, Mapping):
                        yield from _unknown_keys(nested, item, f"{path}[{index}]")
                    else:
                        yield f"{path}[{index}]: expected a mapping, not {item!r}"
            else:
                yield from _unknown_keys(nested, value, path)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The one pydantic model an annotation like `list[M] | None` is about; none where a plain dict is as legal."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, list, type(int | None)):
        members = [member for member in get_args(annotation) if member is not type(None)]
        if len(members) == 1:
            yield from _models_in(members[0])
