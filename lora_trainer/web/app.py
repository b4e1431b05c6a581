"""The application: the routes under `/api`, the page's files, and errors as problems with their fixes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.staticfiles import StaticFiles

from lora_trainer.core.disk import FULL, refusal
from lora_trainer.core.errors import Problem, UserError
from lora_trainer.core.version import __version__
from lora_trainer.web import (
    dataset_work,
    datasets,
    doctor_api,
    drawn_masks,
    library,
    live,
    machine_now,
    new_run,
    queue_api,
    runs,
    tasks,
    uploads,
)
from lora_trainer.web.safety import COOKIE, JSON, LOGIN, Guard, Refusal, answer_of
from lora_trainer.web.server_state import ServerOptions, ServerState, State

PAGE = Path(__file__).with_name("page")
ROUTERS: Sequence[APIRouter] = (
    runs.router,
    new_run.router,
    queue_api.router,
    datasets.router,
    dataset_work.router,
    library.router,
    uploads.router,
    drawn_masks.router,
    tasks.router,
    doctor_api.router,
    machine_now.router,
    live.router,
)

login = APIRouter(default_response_class=JSON)


class Login(BaseModel):
    model_config = ConfigDict(extra="forbid")
    token: str = Field(max_length=200)


@login.post(LOGIN)
def log_in(sent: Login, request: Request, state: State) -> Response:
    """Take the token once, and keep it in a cookie that scripts cannot read."""
    token = state.options.token
    if token is not None and not token.is_it(sent.token):
        raise Refusal(
            401,
            Problem("token_wrong", "The token is wrong.", "`lora-trainer ui` printed it when it was first started."),
        )
    answer = JSON({"needs_token": token is not None})
    if token is not None:
        is_secure = request.url.scheme == "https"
        answer.set_cookie(COOKIE, sent.token, httponly=True, samesite="strict", secure=is_secure, path="/api")
    return answer


def make_app(options: ServerOptions) -> FastAPI:
    """The application for the runs in one folder. It starts nothing and writes nothing until it is asked to."""
    app = FastAPI(
        title="lora-trainer",
        version=__version__,
        description="Everything that the page of `lora-trainer ui` does.",
        docs_url=None,  # they load scripts from other sites
        redoc_url=None,
    )
    app.state.server = ServerState(options)
    for router in (login, *ROUTERS):
        app.include_router(router)
    app.mount("/", StaticFiles(directory=PAGE, html=True))

    @app.exception_handler(UserError)
    def user_error(request: Request, error: UserError) -> Response:
        return answer_of(error)

    @app.exception_handler(RequestValidationError)
    def wrong_request(request: Request, error: RequestValidationError) -> Response:
        fields = [(".".join(map(str, each["loc"][1:])) or "The request", each["msg"]) for each in error.errors()]
        return answer_of(
            Refusal(
                422, [Problem("request_invalid", f"{name}: {what}.", "See /openapi.json.") for name, what in fields]
            )
        )

    @app.exception_handler(HTTPException)
    def http_error(request: Request, error: HTTPException) -> Response:
        answer = answer_of(
            Refusal(error.status_code, Problem("request_refused", f"{error.detail}.", "See /openapi.json."))
        )
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    def unexpected(request: Request, error: Exception) -> Response:
        """A full disk, a file that cannot be read, or a bug; the traceback is in the terminal of the server."""
        if isinstance(error, OSError) and refusal(error) in FULL:
            return answer_of(Refusal(507, Problem("disk_full", "The disk is full.", "Free some space.")))
        message = f"This is a bug in lora-trainer, or a file cannot be read: {type(error).__name__}."
        return answer_of(Refusal(500, Problem("bug", message, "The terminal of `lora-trainer ui` shows more.")))

    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=6)
    app.add_middleware(Guard, token=options.token)
    return app
