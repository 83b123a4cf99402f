//! Defines the manager's state as its API reports it.

use serde::{Deserialize, Serialize};

/// State of the manager, as its API reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Rises by one with each change of the fields below. `total_bytes`, `available_bytes`,
    /// `readied_bytes` and `left_ms` change all the time and do not count.
    pub version: u64,
    /// Memory of the kernel, in bytes.
    pub total_bytes: u64,
    /// Memory available without swapping, in bytes.
    pub available_bytes: u64,
    /// Memory readied for the host before it asks, in bytes.
    pub readied_bytes: u64,
    /// Size that the VM must shrink to.
    pub target: Option<Target>,
    /// Announced eviction of the VM.
    pub eviction: Option<Eviction>,
    /// Bytes that applications go without because too little is available.
    pub squeezed_bytes: u64,
    /// Bytes missing for the reserve and the applications' minima.
    pub short_bytes: u64,
    /// In the order in which they give back.
    pub applications: Vec<ApplicationState>,
}

/// A size that the host has announced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// The host's number of the notice.
    pub id: u64,
    /// Final size as the kernel counts it, in bytes.
    pub total_bytes: u64,
    /// The host was told that it can take the memory.
    pub is_answered: bool,
}

/// An eviction of the VM that the host has announced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Eviction {
    /// The host's number of the notice.
    pub id: u64,
    /// Time until the VM is killed, in milliseconds.
    pub left_ms: u64,
    /// The host was told that all applications know.
    pub is_answered: bool,
}

/// State of one application.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApplicationState {
    /// Its name.
    pub name: String,
    /// Kind of its adapter: `redis`, `memcached`, `cgroup`, `jvm`, `hook` or `api`.
    pub kind: String,
    /// Number of the last order, which the application confirms; 0 before the first.
    pub order: u64,
    /// Limit of the application, in bytes.
    pub limit_bytes: u64,
    /// Progress of the last order.
    pub status: ApplicationStatus,
    /// Reason why the application was not told, or did not comply.
    pub failure: Option<String>,
}

/// Progress of an application with its last order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ApplicationStatus {
    /// The application is within its limit, or may grow.
    #[default]
    Settled,
    /// The application gives back; later ones wait.
    Draining,
    /// The application did not give back in time; others no longer wait for it.
    Late,
}

impl State {
    /// Whether the states agree in all that `version` counts.
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
