//! A volume as a block device of this host's kernel (ublk, Linux 6.4): `/dev/ublkbN`.
//!
//! The kernel's driver hands the requests of the device to a process, over io_uring. The device outlives the
//! processes that serve it, as a mount does: one that is killed leaves a device that waits, and its successor has the
//! requests that were under way given to it once more. What was done and not answered is done twice, which is as
//! once.
//!
//! The driver's interface is spoken here and not by `libublk`: a process takes over the device that another one had
//! made, and that crate's build needs libclang. What there is to speak are a dozen commands.
//!
//! | module | what it is about |
//! |---|---|
//! | `abi` | the driver's numbers, and what they are made of |
//! | `control` | making devices, starting and removing them |
//! | [`disk`] | a device, which outlives the processes that serve it |
//! | `left` | devices that nobody is left for |
//! | `owner` | whose a device is |
//! | `queue` | what the kernel asks for, and its answers |
//! | `request` | doing one of those |
//! | `size` | another size, while it is used |
//! | [`server`] | threads that answer |

mod abi;
mod control;
pub mod disk;
mod left;
mod owner;
mod queue;
mod request;
pub mod server;
mod size;

pub use control::{UblkError, check};
pub use disk::Disk;
pub use left::remove_left;
pub use owner::Owner;
pub use server::DiskServer;
