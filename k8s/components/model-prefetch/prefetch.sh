#!/bin/sh
# Brings the models of a list into a folder. A line: repository, revision, folder below it, files (none: all of them).
# `hf download` resumes, checks what it gets, and does nothing for what is there.
#
#   prefetch.sh models.txt /models
set -eu
list=$1
target=$2
while read -r repository revision folder files || [ -n "$repository" ]; do
    case $repository in '' | '#'*) continue ;; esac
    echo "$repository@$revision -> $target/$folder"
    # shellcheck disable=SC2086  # several files are several arguments
    hf download "$repository" $files --revision "$revision" --local-dir "$target/$folder" </dev/null
done <"$list"
echo "all models are there"
