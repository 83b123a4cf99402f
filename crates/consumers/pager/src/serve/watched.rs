//! Keeps a lane with what was asked for on it.

use hecaton_space::Lane;
use std::collections::HashMap;

/// A lane, and which set of its descriptors is watched.
pub(super) struct Watched<Request> {
    pub(super) lane: Lane,
    pub(super) generation: Option<u64>,
    pub(super) requests: HashMap<u64, Request>,
}

impl<Request> Watched<Request> {
    pub(super) fn new(lane: Lane) -> Watched<Request> {
        Watched { lane, generation: None, requests: HashMap::new() }
    }
}
