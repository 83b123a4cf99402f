//! A space passes to a process of another node.
//!
//! Its owner names that node to all donors, and goes on as before. The heir comes as a successor on
//! the same node does ([`Space::adopt`]): with a higher epoch, which fences what its predecessor
//! still sends. How far it has got, the predecessor sees by what donors answer it.

use crate::SpaceError;
use crate::control::Persistence;
use crate::space::Space;
use hecaton_transport::client::Outcome;
use hecaton_transport::protocol::{Refusal, Request};

/// Owner of a space that was to pass to another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heritage {
    /// This node, at all donors that have some of it, and they know the heir.
    Own,
    /// The heir at some donors, and this node at others.
    Passing,
    /// The heir.
    Passed,
}

impl Space {
    /// Lets a node take the space over, and nobody else. To be repeated until it has: a donor that
    /// is started again does not know the heir any more. Fails if a donor that has some of it
    /// cannot be told.
    pub fn bequeath(&self, heir: &str) -> Result<Heritage, SpaceError> {
        // Where nodes have no certificates, whoever has the higher epoch may.
        let request = match self.config().credentials {
            Some(_) => Request::Bequeath { node: heir },
            None => Request::Renew,
        };
        let told = self.each_donor(|donor| {
            let outcome = match self.call(donor, None, request, Persistence::Once) {
                Ok(answered) => answered.outcome,
                Err(SpaceError::Refused { refusal, .. }) => Outcome::Refused(refusal),
                Err(error) => return (donor.index, Err(error)),
            };
            match outcome {
                Outcome::Done => (donor.index, Ok(true)),
                Outcome::Refused(Refusal::OtherNode) => (donor.index, Ok(false)),
                outcome => (donor.index, Err(self.odd(donor, outcome))),
            }
        });
        if self.is_fenced() {
            return Ok(Heritage::Passed);
        }
        let holding = self.map().donors_of_zone(0);
        let (mut own, mut passed, mut failed) = (0, 0, None);
        for (donor, answer) in told {
            match answer {
                Ok(true) if holding.contains_key(&donor) => own += 1,
                // One that has nothing of it may be unknown to the heir.
                Ok(true) => {}
                Ok(false) => passed += 1,
                Err(error) if holding.contains_key(&donor) => failed = Some(error),
                Err(_) => {}
            }
        }
        match (own, passed, failed) {
            (_, 0, Some(error)) => Err(error),
            (_, 0, None) => Ok(Heritage::Own),
            // One that is away may have forgotten the heir, and is told when it is back.
            (0, _, None) => Ok(Heritage::Passed),
            _ => Ok(Heritage::Passing),
        }
    }
}
