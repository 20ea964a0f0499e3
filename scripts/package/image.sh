#!/usr/bin/env bash
# Pushes the image of a version as a draft, or gives the draft its own tags once a person has published the release.
#   scripts/package/image.sh draft VERSION FOLDER        FOLDER has the packages for each processor
#   scripts/package/image.sh publish VERSION [latest]
# REGISTRY, REPOSITORY (owner/name), ACTOR and TOKEN say where to, and who.
set -euo pipefail
action=$1 version=$2
image=$REGISTRY/$(echo "$REPOSITORY" | tr '[:upper:]' '[:lower:]')
docker login "$REGISTRY" --username "$ACTOR" --password-stdin <<< "$TOKEN"
case $action in
  draft)
    docker buildx build --push --platform linux/amd64,linux/arm64 -f packaging/Containerfile.release \
      --tag "$image:$version-draft" "$3"
    ;;
  publish)
    tags=(--tag "$image:$version")
    [ "${3:-}" != latest ] || tags+=(--tag "$image:latest")
    # The same bytes by other names.
    docker buildx imagetools create "${tags[@]}" "$image:$version-draft"
    ;;
  *) echo "image: draft or publish" >&2; exit 2 ;;
esac
