//! What the manager says of itself.

use serde::{Deserialize, Serialize};

/// The manager's state, as its API tells it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Goes up by one with each change of what stands below, `total_bytes`, `available_bytes`, `readied_bytes` and `left_ms`
    /// excepted, which change all the time.
    pub version: u64,
    /// The memory that the kernel has, in bytes.
    pub total_bytes: u64,
    /// What of it could be had without swapping, in bytes.
    pub available_bytes: u64,
    /// What of it is readied for the host ahead of its asking, in bytes.
    pub readied_bytes: u64,
    /// The size that it is to shrink to.
    pub target: Option<Target>,
    /// It is to go.
    pub eviction: Option<Eviction>,
    /// What applications go without because too little is available, in bytes.
    pub squeezed_bytes: u64,
    /// What is missing for the applications' minima, in bytes.
    pub short_bytes: u64,
    /// In the order in which they give back.
    pub applications: Vec<ApplicationState>,
}

/// A size that the host has announced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// The host's number of the notice.
    pub id: u64,
    /// What the kernel will have, in bytes.
    pub total_bytes: u64,
    /// The host was told that the memory can be taken.
    pub is_answered: bool,
}

/// An end that the host has announced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Eviction {
    /// The host's number of the notice.
    pub id: u64,
    /// How long until the machine is killed, in milliseconds.
    pub left_ms: u64,
    /// The host was told that all applications know.
    pub is_answered: bool,
}

/// One application.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApplicationState {
    /// Its name.
    pub name: String,
    /// How it is told: `redis`, `memcached`, `cgroup`, `jvm`, `hook` or `api`.
    pub kind: String,
    /// The number of what it was told last: what is confirmed. 0 before the first.
    pub order: u64,
    /// What it may have, in bytes.
    pub limit_bytes: u64,
    /// How far it is.
    pub status: ApplicationStatus,
    /// Why it could not be told, or did not do as it was told.
    pub failure: Option<String>,
}

/// How far an application is with what it was told last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ApplicationStatus {
    /// It has what it may have, or less, or may grow.
    #[default]
    Settled,
    /// It gives back; those after it wait.
    Draining,
    /// It has not given back in time; nobody waits for it any more.
    Late,
}

impl State {
    /// Whether nothing has changed that counts.
    pub(crate) fn is_like(&self, other: &State) -> bool {
        let fixed = |state: &State| {
            let mut state = state.clone();
            (state.version, state.total_bytes) = (0, 0);
            (state.available_bytes, state.readied_bytes) = (0, 0);
            if let Some(eviction) = &mut state.eviction {
                eviction.left_ms = 0;
            }
            state
        };
        fixed(self) == fixed(other)
    }
}
