#!/bin/sh
# Makes /venv with the packages of a lock, without what no service reads: packages.sh LOCK
set -eu
python3 -m venv --without-pip /venv
python3 -m pip --python /venv/bin/python install --no-cache-dir --no-deps --require-hashes -r "$1"
cd /venv/lib/python3*/site-packages
# Tests, types and headers; what builds extensions of numpy; Pillow's AVIF, fonts and colour profiles.
find . -type d -name tests -prune -exec rm -r {} +
find . -type f \( -name '*.pyi' -o -name '*.pxd' -o -name '*.a' -o -name '*.h' \) -delete
rm -rf numpy/f2py numpy/distutils numpy/_core/_simd.*.so numpy/_core/_*_tests.*.so
rm -f PIL/_avif.*.so PIL/_imagingft.*.so PIL/_imagingcms.*.so
rm -f pillow.libs/libavif-* pillow.libs/libfreetype-* pillow.libs/libharfbuzz-* pillow.libs/liblcms2-*
# uvloop and tokenizers come with their symbols. Libraries that auditwheel changed stay as they are.
apt-get update -q && apt-get install -q -y --no-install-recommends binutils
find . -type f -name '*.so' -not -path './numpy*' -not -path './PIL/*' -not -path '*.libs/*' \
  -exec strip --strip-unneeded {} +
