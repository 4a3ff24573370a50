"""AWS Lambda by name: what `lambda://NAME` becomes on the wire. botocore signs, and finds region and credentials.

The function is one that `rollart reward build lambda` makes: it answers `{"statusCode", "headers", "body"}`, whoever
calls it. `AWS_ENDPOINT_URL_LAMBDA` leads the calls elsewhere, to an emulator say.
"""

import base64
import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from rollart.errors import JobError, install

SCHEME = "lambda://"
ENDPOINT_VARIABLE = "AWS_ENDPOINT_URL_LAMBDA"
FAILED_HEADER = "X-Amz-Function-Error"
"""With status 200: the function itself raised, or died."""


class LambdaFunction:
    """One function: where it is called, and the headers that prove who calls."""

    def __init__(self, url: str) -> None:
        """Raises JobError where botocore, a region or credentials are missing."""
        try:
            from botocore.session import Session
        except ImportError as error:
            raise JobError(f"{url} needs botocore: {install('lambda')}") from error
        session: Any = Session()
        region = os.environ.get("AWS_REGION") or session.get_config_variable("region")
        endpoint = os.environ.get(ENDPOINT_VARIABLE) or (f"https://lambda.{region}.amazonaws.com" if region else "")
        self._credentials = session.get_credentials()
        if not endpoint or not region or self._credentials is None:
            raise JobError(
                f"{url}: AWS's region or credentials are not known here; set AWS_REGION, and AWS_ACCESS_KEY_ID with "
                "AWS_SECRET_ACCESS_KEY or a profile"
            )
        name = quote(urlsplit(url).netloc or url.removeprefix(SCHEME), safe=":")
        self.url = f"{endpoint.rstrip('/')}/2015-03-31/functions/{name}/invocations"
        self._region = region

    def headers(self, body: bytes) -> Mapping[str, str]:
        """Of one call with this body."""
        from botocore.auth import SigV4Auth
        from botocore.awsrequest import AWSRequest

        request: Any = AWSRequest("POST", self.url, data=body, headers={"Content-Type": "application/json"})
        SigV4Auth(self._credentials.get_frozen_credentials(), "lambda", self._region).add_auth(request)
        return dict(request.headers.items())


def event_of(body: bytes, headers: Mapping[str, str]) -> bytes:
    """What the function is given: as its own URL would."""
    if "Content-Encoding" not in headers:
        return json.dumps({"headers": dict(headers), "body": body.decode()}).encode()
    coded = {"body": base64.b64encode(body).decode(), "isBase64Encoded": True}
    return json.dumps({"headers": dict(headers), **coded}).encode()
