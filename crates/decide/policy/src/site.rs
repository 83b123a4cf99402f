//! Where hosts stand, and what that says of two of them: what one failure takes with it, and how
//! far a page has to travel.

use serde::{Deserialize, Serialize};

/// A host, and where it stands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Site {
    /// The host's name.
    pub host: String,
    /// Where it stands, from the outside in: `rack1/chassis2`. Nothing if nobody said.
    #[serde(default)]
    pub location: Option<String>,
}

/// How much has to fail for two hosts to be lost at once, from the least to the most.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Apart {
    /// They are one host.
    Not,
    /// They are two, in one rack or in places that nobody named.
    Hosts,
    /// They are in different racks: their locations differ in the first name.
    Racks,
}

impl Site {
    /// A host of which nobody said where it stands.
    pub fn unplaced(host: &str) -> Site {
        Site { host: host.to_owned(), location: None }
    }

    /// How far apart the two are as to failures. An unknown location counts as close.
    pub fn apart(&self, other: &Site) -> Apart {
        let rack = |site: &Site| site.levels().next().map(str::to_owned);
        match (rack(self), rack(other)) {
            _ if self.host == other.host => Apart::Not,
            (Some(one), Some(another)) if one != another => Apart::Racks,
            _ => Apart::Hosts,
        }
    }

    /// How far a page travels from there to here: 0 on the same host, 1 in the same place, and one
    /// more for each level that has to be left. An unknown location of `other` counts as far.
    pub fn distance(&self, other: &Site) -> u32 {
        if self.host == other.host {
            return 0;
        }
        let shared = self.levels().zip(other.levels()).take_while(|(a, b)| a == b).count();
        1 + (self.levels().count() - shared) as u32
    }

    fn levels(&self) -> impl Iterator<Item = &str> {
        self.location.iter().flat_map(|location| location.split('/'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(host: &str, location: &str) -> Site {
        Site { host: host.to_owned(), location: Some(location.to_owned()) }
    }

    #[test]
    fn racks_are_further_apart_than_hosts() {
        let here = at("a", "r1/c1");
        assert_eq!(
            here.apart(&at("a", "r2/c1")),
            Apart::Not,
            "whatever is said of where it stands"
        );
        assert_eq!(here.apart(&at("b", "r1/c1")), Apart::Hosts);
        assert_eq!(here.apart(&at("b", "r1/c2")), Apart::Hosts);
        assert_eq!(here.apart(&at("b", "r2/c1")), Apart::Racks);
        assert!(Apart::Not < Apart::Hosts && Apart::Hosts < Apart::Racks);
    }

    #[test]
    fn what_is_not_known_is_close_for_failures_and_far_for_pages() {
        let here = at("a", "r1/c1");
        assert_eq!(here.apart(&Site::unplaced("b")), Apart::Hosts);
        assert_eq!(Site::unplaced("b").apart(&Site::unplaced("c")), Apart::Hosts);
        assert_eq!(here.distance(&Site::unplaced("b")), 3);
        assert_eq!(Site::unplaced("b").distance(&Site::unplaced("c")), 1);
    }

    #[test]
    fn each_level_that_is_left_is_one_further() {
        let here = at("a", "r1/c1");
        let to = |other: &Site| here.distance(other);
        assert_eq!(to(&at("a", "r1/c1")), 0);
        assert_eq!(to(&at("b", "r1/c1")), 1);
        assert_eq!(to(&at("b", "r1/c2")), 2);
        assert_eq!(to(&at("b", "r1")), 2);
        assert_eq!(to(&at("b", "r2/c1")), 3, "a chassis of the same name in another rack");
    }
}
