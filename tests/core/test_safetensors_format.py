"""Tensors on the wire: headers that lie are refused."""

import pytest

from forebay.core.errors import InvalidInput
from forebay.core.safetensors_format import read_blob


@pytest.mark.parametrize(
    "info",
    [
        b'{"dtype":"I64","shape":[2],"data_offsets":[0,8]}',
        b'{"dtype":"I64","shape":[-1],"data_offsets":[8,0]}',
        b'{"dtype":"I64","shape":[-1,-1],"data_offsets":[0,8]}',
        b'{"dtype":"I64","shape":[2,1],"data_offsets":[0,8]}',
        b'{"dtype":"F4","shape":[16],"data_offsets":[0,8]}',
        b'{"dtype":"I64","shape":[1],"data_offsets":[-8,0]}',
    ],
)
def test_a_header_that_lies_is_refused(info: bytes) -> None:
    header = b'{"x":' + info + b"}"
    with pytest.raises(InvalidInput):
        read_blob(len(header).to_bytes(8, "little") + header + bytes(8))
