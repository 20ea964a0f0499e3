#!/usr/bin/env bash
# Pushes the images of a version as drafts, or gives the drafts their own tags once a person has published the release.
#   scripts/package/image.sh draft VERSION FOLDER        FOLDER has the packages for each processor
#   scripts/package/image.sh publish VERSION [latest]
# Tags with -cuda name the image with CUDA. REGISTRY, REPOSITORY (owner/name), ACTOR and TOKEN say where to, and who.
set -euo pipefail
action=$1 version=$2
image=$REGISTRY/$(echo "$REPOSITORY" | tr '[:upper:]' '[:lower:]')
docker login "$REGISTRY" --username "$ACTOR" --password-stdin <<< "$TOKEN"
draft() { # CONTAINERFILE TAG FOLDER
  docker buildx build --push --platform linux/amd64,linux/arm64 -f "$1" --tag "$image:$2-draft" "$3"
}
publish() { # TAG [ANOTHER]
  local tag tags=()
  for tag; do tags+=(--tag "$image:$tag"); done
  # The same bytes by other names.
  docker buildx imagetools create "${tags[@]}" "$image:$1-draft"
}
case $action in
  draft)
    draft packaging/Containerfile.release "$version" "$3"
    draft packaging/Containerfile.cuda "$version-cuda" "$3"
    ;;
  publish)
    latest=()
    [ "${3:-}" != latest ] || latest=(latest)
    publish "$version" ${latest[@]+"${latest[@]}"}
    publish "$version-cuda" ${latest[@]+"${latest[@]/%/-cuda}"}
    ;;
  *) echo "image: draft or publish" >&2; exit 2 ;;
esac
