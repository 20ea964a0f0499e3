#!/usr/bin/env bash
# Runs a command and prints how long it took, and the processors' time in user and system code: timed.sh NAME COMMAND...
TIMEFORMAT="step: $1 took %0R s, %0U + %0S CPU s"; shift
time "$@"
