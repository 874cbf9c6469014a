#!/bin/sh
# Stands in for nvcc: compiles .cu sources without device code as C++.
[ "$1" = --dryrun ] && exit 0
arguments=
for argument in "$@"; do
    case $argument in
        *.cu) arguments="$arguments -x c++ $argument" ;;
        -Xcompiler=*) arguments="$arguments ${argument#-Xcompiler=}" ;;
        *) arguments="$arguments $argument" ;;
    esac
done
exec g++ @INCLUDE@ $arguments
