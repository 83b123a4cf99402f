//! Devices that nobody is left for: who made them was killed, and the process that served them,
//! too.
//!
//! The driver keeps such a device for a successor, and what is asked of it waits. But what the
//! volume held is gone with both of them, and so no successor comes: whoever has the device open
//! would wait for ever, its file system could not be unmounted, and the host not be shut down. Once
//! the device is gone they find errors.

use super::Owner;
use super::abi::state;
use super::control::{Control, DEVICE};
use super::disk::remove;
use std::fs;
use std::path::Path;

/// Removes what this owner's predecessor has left and nobody serves, except `adopted`, for which
/// there is somebody. Returns the numbers of the devices.
pub fn remove_left(owner: Owner, adopted: &[u32]) -> Vec<u32> {
    if !Path::new(DEVICE).exists() {
        return Vec::new();
    }
    // One who may not, or whose kernel cannot, has made none.
    let Ok(control) = Control::open() else { return Vec::new() };
    let names = fs::read_dir("/dev").into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let numbers = names.filter_map(|name| name.strip_prefix("ublkc")?.parse().ok());
    let is_left = |number: &u32| {
        let info = control.info(*number);
        !adopted.contains(number)
            && info.is_ok_and(|info| {
                info.own_flags == owner.0 && [state::DEAD, state::QUIESCED].contains(&info.state)
            })
    };
    let left: Vec<u32> = numbers.filter(is_left).collect();
    left.iter().for_each(|number| remove(&control, *number));
    left
}
