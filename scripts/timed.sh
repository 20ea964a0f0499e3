#!/usr/bin/env bash
# Runs a command and prints how long it took: timed.sh NAME COMMAND...
name=$1; shift
status=0
"$@" || status=$?
echo "step: $name took $SECONDS s"
exit $status
