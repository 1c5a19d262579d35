"""Another user of the machine, who holds no key: tries what listens there, and says what it got. Python
alone, no distruntime.

Reads from standard input, as JSON, the ports to try and the folders to look into; prints what came back, as
JSON.
"""

from __future__ import annotations

import glob
import json
import os
import socket
import struct
import sys

TRIED = {
    # In the protocol of torch's TCPStore, this validates, then asks how many keys there are.
    "store": b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x07",
    # This is a tensor of four numbers, as protocol 5 took it: the secret, from rank 0 under tag 1, 16 bytes.
    "old header": struct.pack("!16sIQQ", bytes(16), 0, 1, 16) + struct.pack("<4f", 666, 666, 666, 666),
    # This is a hello, a proof that is made up, and a message behind it.
    "new header": struct.pack("!8sII32s", b"dr-data6", 0, 1, bytes(32))
    + bytes(32)
    + struct.pack("!QQ", 1, 16)
    + bytes(16),
    "gloo": struct.pack("<Q", 1),
    "web": b"GET / HTTP/1.0\r\n\r\n",
    "tls": b"\x16\x03\x01\x00\x05hello",
    "nothing": b"",
}


def answer(connection: socket.socket, said: bytes) -> str:
    connection.settimeout(0.3)
    try:
        connection.sendall(said)
        return connection.recv(4096).hex()
    except OSError:
        return ""


def main() -> None:
    asked = json.load(sys.stdin)
    got = {}
    for port in asked["ports"]:
        for name, said in TRIED.items():
            for _ in range(asked["times"]):
                with socket.socket() as connection:
                    try:
                        connection.connect(("127.0.0.1", port))
                    except OSError:
                        continue
                    got[f"{port} {name}"] = answer(connection, said)
    reached = []
    for path in asked["paths"]:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(path)
                reached.append(path)
            except OSError:
                pass
        try:
            reached += os.listdir(os.path.dirname(path))
        except OSError:
            pass
    # These files lie in the folder for temporary files, wherever it is open.
    found = [
        name
        for folder in asked["folders"]
        for name in glob.glob(f"{folder}/**", recursive=True)
        if os.access(name, os.R_OK)
    ]
    print(json.dumps({"got": got, "reached": reached, "found": found}))


if __name__ == "__main__":
    main()
