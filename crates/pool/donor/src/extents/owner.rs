//! Decides which nodes may use a space, where nodes have certificates.
//!
//! A space belongs to the node that fenced it here first, while the donor knows the space. Other
//! nodes are refused, whatever their epoch. Nodes that the owner admitted may read, since copies go
//! from donor to donor. Without certificates nodes look alike, and no space has an owner.
//!
//! A space changes owner only by the owner's will. The owner names a successor, whose Fence with a
//! higher epoch makes the successor the owner. Until that Fence the owner keeps the space, so that
//! an absent successor takes nothing.
//!
//! Fencing makes the owner, not connecting or allocating: each borrower fences unasked, before any
//! other request, in every incarnation. So a donor whose predecessor knew no owners learns them
//! when the borrowers return. Donors, which connect to each other to copy, never become owners.

use hecaton_memory::Epoch;
use hecaton_transport::protocol::{OWNERS_SINCE, Refusal};
use ring::digest::{SHA256, digest};
use std::collections::HashSet;

/// Most nodes that an owner may admit: as many as a cluster has.
const MAX_ADMITTED: usize = 1024;

/// Digest of a node's name: 128 bits of its SHA-256, the lowest bit always set. It fits in a
/// space's record in the ledger; a name does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeDigest([u64; 2]);

impl NodeDigest {
    /// Digests a node's name.
    pub fn of(name: &str) -> NodeDigest {
        let digest = digest(&SHA256, name.as_bytes());
        let words = digest.as_ref().as_chunks::<8>().0;
        let [first, second, ..] = words else { unreachable!("it has 32 bytes") };
        NodeDigest([u64::from_le_bytes(*first) | 1, u64::from_le_bytes(*second)])
    }

    /// Words as they are stored. The first one is not zero.
    pub(crate) fn words(self) -> [u64; 2] {
        self.0
    }

    /// Reads stored words; `None` if the first one is zero.
    pub(crate) fn from_words(words: [u64; 2]) -> Option<NodeDigest> {
        (words[0] != 0).then_some(NodeDigest(words))
    }
}

/// Owner, successor and readers of a space.
#[derive(Debug)]
pub(crate) struct Ownership {
    owner: Option<NodeDigest>,
    /// Node that may take the space over.
    heir: Option<NodeDigest>,
    readers: Readers,
}

/// Nodes that may read besides the owner.
#[derive(Debug)]
enum Readers {
    /// The owner's version cannot admit nodes, but the owner still has copies made.
    Everybody,
    Admitted(HashSet<NodeDigest>),
}

impl Ownership {
    pub(crate) fn new(owner: Option<NodeDigest>) -> Ownership {
        Ownership { owner, heir: None, readers: Readers::Admitted(HashSet::new()) }
    }

    /// Records the Fence of a node that passed [`Ownership::check_successor`] and speaks `version`.
    /// Returns whether the node has become the new owner.
    pub(crate) fn fenced(&mut self, node: NodeDigest, version: u16) -> bool {
        let is_new = self.owner != Some(node);
        if is_new {
            self.heir = None;
        }
        match self.readers {
            _ if version < OWNERS_SINCE => self.readers = Readers::Everybody,
            // A new owner starts without readers: before it, any node could have admitted some.
            Readers::Admitted(_) if !is_new => {}
            Readers::Admitted(_) | Readers::Everybody => {
                self.readers = Readers::Admitted(HashSet::new());
            }
        }
        self.owner = Some(node);
        is_new
    }

    /// Refuses every node but the owner; passes if either is unknown.
    pub(crate) fn check(&self, node: Option<NodeDigest>) -> Result<(), Refusal> {
        match node.zip(self.owner) {
            Some((node, owner)) if node != owner => Err(Refusal::OtherNode),
            _ => Ok(()),
        }
    }

    /// Refuses a Fence with `epoch` where the space stands at `fence`. Only the owner passes, and
    /// its successor with a higher epoch.
    pub(crate) fn check_successor(
        &self,
        node: Option<NodeDigest>,
        epoch: Epoch,
        fence: Epoch,
    ) -> Result<(), Refusal> {
        match node {
            Some(node) if self.owner.is_some() && self.heir == Some(node) && epoch > fence => {
                Ok(())
            }
            node => self.check(node),
        }
    }

    /// Refuses nodes that may not read.
    pub(crate) fn check_reader(&self, node: Option<NodeDigest>) -> Result<(), Refusal> {
        let may_read = |node: NodeDigest| match &self.readers {
            Readers::Everybody => true,
            Readers::Admitted(nodes) => nodes.contains(&node),
        };
        match node {
            Some(node) if may_read(node) || self.heir == Some(node) => Ok(()),
            node => self.check(node),
        }
    }

    /// Names the only node that may take the space over.
    pub(crate) fn bequeath(&mut self, heir: NodeDigest) {
        self.heir = Some(heir).filter(|heir| self.owner.is_some_and(|owner| owner != *heir));
    }

    /// Lets a node's donors read.
    pub(crate) fn admit(&mut self, node: NodeDigest) -> Result<(), Refusal> {
        let Readers::Admitted(admitted) = &mut self.readers else { return Ok(()) };
        if admitted.len() >= MAX_ADMITTED && !admitted.contains(&node) {
            return Err(Refusal::Busy);
        }
        admitted.insert(node);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REFUSED: Result<(), Refusal> = Err(Refusal::OtherNode);

    #[test]
    fn a_space_is_whose_it_became_first() {
        let [a, b] = ["a", "b"].map(NodeDigest::of);
        assert_ne!(a, b);
        let mut space = Ownership::new(None);
        for node in [None, Some(a), Some(b)] {
            assert_eq!((space.check(node), space.check_reader(node)), (Ok(()), Ok(())), "nobody's");
        }
        space.admit(b).expect("there is room");
        assert!(space.fenced(a, OWNERS_SINCE), "and nobody has been admitted");
        assert!(!space.fenced(a, OWNERS_SINCE), "it is already");
        for node in [None, Some(a)] {
            assert_eq!((space.check(node), space.check_reader(node)), (Ok(()), Ok(())));
        }
        assert_eq!((space.check(Some(b)), space.check_reader(Some(b))), (REFUSED, REFUSED));
        space.admit(b).expect("there is room");
        assert_eq!((space.check(Some(b)), space.check_reader(Some(b))), (REFUSED, Ok(())));
        assert!(!space.fenced(a, OWNERS_SINCE));
        assert_eq!(space.check_reader(Some(b)), Ok(()), "another connection takes nothing back");
    }

    #[test]
    fn a_successor_finds_the_owner_and_is_told_anew_who_may_read() {
        let [a, b] = ["a", "b"].map(NodeDigest::of);
        let mut next = Ownership::new(NodeDigest::from_words(a.words()));
        assert_eq!((next.check(Some(a)), next.check_reader(Some(b))), (Ok(()), REFUSED));
        assert!(!next.fenced(a, OWNERS_SINCE));
        assert_eq!(NodeDigest::from_words([0, 7]), None);
    }

    #[test]
    fn all_may_read_as_long_as_the_owner_cannot_admit() {
        let [a, b] = ["a", "b"].map(NodeDigest::of);
        let mut space = Ownership::new(None);
        assert!(space.fenced(a, OWNERS_SINCE - 1));
        assert_eq!((space.check(Some(b)), space.check_reader(Some(b))), (REFUSED, Ok(())));
        assert!(!space.fenced(a, OWNERS_SINCE), "it was updated");
        assert_eq!((space.check(Some(b)), space.check_reader(Some(b))), (REFUSED, REFUSED));
        assert!(!space.fenced(a, OWNERS_SINCE - 1), "and that was undone");
        assert_eq!((space.check(Some(b)), space.check_reader(Some(b))), (REFUSED, Ok(())));
    }

    #[test]
    fn it_passes_to_the_heir_with_its_fence_of_a_higher_epoch() {
        let [a, b, c] = ["a", "b", "c"].map(NodeDigest::of);
        let may_fence = |space: &Ownership, node, epoch| {
            space.check_successor(Some(node), Epoch(epoch), Epoch(4)).is_ok()
        };
        let mut space = Ownership::new(None);
        space.bequeath(c);
        assert!(space.fenced(a, OWNERS_SINCE));
        assert!(!may_fence(&space, c, 5), "nobody's space has no heir");
        space.bequeath(c);
        space.bequeath(b);
        assert!(may_fence(&space, b, 5) && !may_fence(&space, b, 4) && !may_fence(&space, c, 5));
        assert_eq!((space.check(Some(a)), space.check(Some(b))), (Ok(()), REFUSED), "not yet");
        assert!(!space.fenced(a, OWNERS_SINCE), "a process after the one that named the heir");
        assert!(may_fence(&space, b, 5));
        assert!(space.fenced(b, OWNERS_SINCE));
        assert_eq!((space.check(Some(a)), space.check(Some(b))), (REFUSED, Ok(())));
        assert_eq!(space.check_reader(Some(a)), REFUSED);
        assert!(!may_fence(&space, a, 99) && !may_fence(&space, c, 99));
    }

    #[test]
    fn no_more_are_admitted_than_there_are_nodes() {
        let mut space = Ownership::new(Some(NodeDigest::of("a")));
        let node = |number: usize| NodeDigest::of(&format!("n{number}"));
        (0..MAX_ADMITTED).for_each(|number| space.admit(node(number)).expect("there is room"));
        assert_eq!(space.admit(node(MAX_ADMITTED)), Err(Refusal::Busy));
        assert_eq!(space.admit(node(0)), Ok(()), "it is one of them");
    }
}
