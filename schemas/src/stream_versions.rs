//! Versions of the protocol: what a peer speaks, and the choice of one.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The versions that a peer speaks, without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamVersions {
    /// The oldest.
    pub oldest: u16,
    /// The newest.
    pub newest: u16,
}

impl StreamVersions {
    /// What this build speaks. A new version keeps the one before, so that a cluster can be updated node by node.
    pub const OURS: StreamVersions = StreamVersions { oldest: 1, newest: 1 };

    /// A node from before this protocol, which streamed lines of JSON over a connection for each request.
    pub const BEFORE: StreamVersions = StreamVersions { oldest: 0, newest: 0 };

    /// The newest version that both speak.
    pub fn common(self, other: StreamVersions) -> Option<u16> {
        let newest = self.newest.min(other.newest);
        (newest >= self.oldest.max(other.oldest)).then_some(newest)
    }
}

impl fmt::Display for StreamVersions {
    /// `1-2`, as in the header.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.oldest, self.newest)
    }
}

impl FromStr for StreamVersions {
    type Err = ();

    fn from_str(text: &str) -> Result<StreamVersions, ()> {
        let (oldest, newest) = text.split_once('-').ok_or(())?;
        let versions = StreamVersions { oldest: oldest.parse().map_err(drop)?, newest: newest.parse().map_err(drop)? };
        if versions.oldest <= versions.newest { Ok(versions) } else { Err(()) }
    }
}

/// The peers speak no common version. Client-safe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionMismatch {
    /// What the node speaks.
    pub node: StreamVersions,
    /// What the endpoint speaks.
    pub endpoint: StreamVersions,
}

impl VersionMismatch {
    /// Returns the newest common version. Errors: there is none.
    pub fn check(node: StreamVersions, endpoint: StreamVersions) -> Result<u16, VersionMismatch> {
        node.common(endpoint).ok_or(VersionMismatch { node, endpoint })
    }
}

impl std::error::Error for VersionMismatch {}

impl fmt::Display for VersionMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let VersionMismatch { node, endpoint } = self;
        let older = if node.newest < endpoint.oldest { "node" } else { "endpoint" };
        write!(
            f,
            "the node speaks {} of the stream protocol and the endpoint {}: update the {older}",
            RangeWords(*node),
            RangeWords(*endpoint)
        )
    }
}

/// A range in words.
struct RangeWords(StreamVersions);

impl fmt::Display for RangeWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            StreamVersions { oldest, newest } if oldest == newest => write!(f, "version {newest}"),
            StreamVersions { oldest, newest } => write!(f, "versions {oldest} to {newest}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_common_version_is_chosen_or_both_are_named() {
        let versions = |text: &str| text.parse::<StreamVersions>().unwrap();
        for (node, endpoint, chosen) in [("1-1", "1-1", 1), ("1-2", "2-3", 2), ("2-3", "1-2", 2), ("1-4", "2-3", 3)] {
            assert_eq!(VersionMismatch::check(versions(node), versions(endpoint)), Ok(chosen));
            assert_eq!(versions(node).to_string(), node);
        }
        let said = |node, endpoint| VersionMismatch::check(versions(node), versions(endpoint)).unwrap_err().to_string();
        assert_eq!(
            said("0-0", "1-2"),
            "the node speaks version 0 of the stream protocol and the endpoint versions 1 to 2: update the node"
        );
        assert_eq!(
            said("2-3", "1-1"),
            "the node speaks versions 2 to 3 of the stream protocol and the endpoint version 1: update the endpoint"
        );
        for text in ["", "1", "2-1", "-", "1-70000", "a-b", "1-2-3"] {
            assert!(text.parse::<StreamVersions>().is_err(), "{text}");
        }
        assert_eq!(StreamVersions::OURS.common(StreamVersions::BEFORE), None);
    }
}
