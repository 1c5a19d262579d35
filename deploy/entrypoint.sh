#!/bin/sh
# It runs as root, copies the key that is mounted at /run/key to a file of the worker's user, and is that worker
# from then on. The worker refuses a key that others may read or that another user owns.
set -eu
home=/home/worker/.config/distruntime
if [ -e /run/key ]; then
    install -o worker -m 600 /run/key "$home/key"
fi
exec setpriv --reuid=worker --regid=worker --init-groups env HOME=/home/worker distruntime-worker "$@"
