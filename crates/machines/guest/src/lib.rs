//! The harvesting manager inside a harvest VM.
//!
//! A guest that shrinks without a word gives memory back as slowly as its kernel finds some. The
//! manager knows beforehand: by a notice of the host, or by watching how much there is and how much
//! of it is available. It has its applications give back first, one after the other, and answers
//! the host when the memory is free. ("Memory-Harvesting VMs in Cloud Platforms", 2022, sections
//! 4.1 and 4.4.)
//!
//! [`Governor`] makes all decisions, without I/O, clock or threads; the other modules carry them
//! out. The manager stores nothing on disk. After a restart it asks the host anew, and tells every
//! application again.

mod answers;
mod api;
mod bounded;
mod config;
mod governor;
mod manager;
mod port;
mod pre_reclaim;
mod serve;
mod share;
mod sink;
mod state;
mod worker;

pub use config::{Config, ConfigError};
pub use governor::{Action, Announcement, Governor, Memory, Order, Reason, Settings};
pub use manager::{Manager, kernel_memory};
pub use serve::{ApiServer, ServeError};
pub use share::{Bounds, limits};
pub use sink::Address;
pub use state::{ApplicationState, ApplicationStatus, Eviction, State, Target};
