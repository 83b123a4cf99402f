//! Takes back one export of a volume; the volume's other exports stay.
//!
//! The process knows the clients of a socket, and closes it. The kernel unmounts a file if no
//! program uses it, in one step and while the process still serves it. This writes the page cache
//! out. For a block device, the kernel has written everything when the last program closed it.
//! The table stays unlocked meanwhile, since this can take as long as a donor is unreachable.

use super::{ExportAddress, STOP_GRACE, Unexporting, Volume, VolumeOrder, Volumes, VolumesError};
use crate::causes::with_causes;
use crate::socket::message::Unexport;
use hecaton_block::{fuse::mount, holders, ublk};
use std::collections::BTreeMap;
use std::path::Path;

impl Volumes {
    /// Has a volume served at an address no more. Refused while somebody is attached there, unless
    /// it is forced.
    pub fn unexport(&self, wish: &Unexport) -> Result<(), VolumesError> {
        let address = self.with(&wish.volume, |volume| volume.exported_at(&wish.address))??;
        let wish = Unexport { address: address.clone(), ..wish.clone() };
        match &address {
            ExportAddress::Fuse(path) => unmount(&wish, path)?,
            ExportAddress::Ublk(Some(number)) => end_disk(&wish, *number)?,
            _ => return self.close_socket(&wish),
        }
        self.with(&wish.volume, |volume| {
            // It serves nothing there any more.
            let order = VolumeOrder::Unexport { address, force: true };
            volume.order(&order, None);
            volume.forget_export(&wish.address);
        })
    }

    fn close_socket(&self, wish: &Unexport) -> Result<(), VolumesError> {
        let Unexport { volume: name, address, force } = wish;
        let is_asked = self.with(name, |volume| {
            let is_asked = volume.unexporting == Unexporting::No && volume.process.is_some();
            if is_asked {
                volume.unexporting = Unexporting::Asked(address.clone());
                let order = VolumeOrder::Unexport { address: address.clone(), force: *force };
                volume.order(&order, None);
            }
            is_asked
        })?;
        if !is_asked {
            let reason =
                "its process is starting, or another export is being taken back; try again";
            return Err(refused(wish, reason.to_owned()));
        }
        let is_undecided = |table: &mut BTreeMap<String, Volume>| {
            table
                .get(name.as_str())
                .is_some_and(|volume| matches!(volume.unexporting, Unexporting::Asked(_)))
        };
        let (mut table, _) = self
            .0
            .changed
            .wait_timeout_while(self.table(), STOP_GRACE, is_undecided)
            .expect("no thread panics with the table");
        let volume =
            table.get_mut(name.as_str()).ok_or_else(|| VolumesError::Unknown(name.clone()))?;
        match std::mem::replace(&mut volume.unexporting, Unexporting::No) {
            Unexporting::Done => Ok(()),
            Unexporting::Refused(reason) => Err(refused(wish, reason)),
            Unexporting::Asked(_) | Unexporting::No => {
                let reason =
                    "its process does not answer; `hecaton volume status` tells its exports";
                Err(refused(wish, reason.to_owned()))
            }
        }
    }
}

fn refused(wish: &Unexport, reason: String) -> VolumesError {
    let Unexport { volume, address, .. } = wish.clone();
    VolumesError::NotUnexported { volume, address, reason }
}

fn in_use(wish: &Unexport, path: &Path) -> VolumesError {
    let holders = holders::in_words(path);
    refused(wish, format!("it is used by {holders}; --force takes it from them"))
}

fn unmount(wish: &Unexport, path: &Path) -> Result<(), VolumesError> {
    if wish.force {
        mount::unmount_by_force(path);
        return Ok(());
    }
    match mount::unmount_unused(path) {
        Ok(true) => Ok(()),
        Ok(false) => Err(in_use(wish, path)),
        Err(errno) => Err(refused(wish, format!("it cannot be unmounted: {errno}"))),
    }
}

fn end_disk(wish: &Unexport, number: u32) -> Result<(), VolumesError> {
    let path = ublk::disk::path(number);
    if !wish.force && ublk::disk::is_in_use(&path) {
        return Err(in_use(wish, &path));
    }
    ublk::disk::stop(number).map_err(|error| refused(wish, with_causes(&error)))
}

impl Volume {
    /// The export that is meant; an error if there is none.
    fn exported_at(&self, wanted: &ExportAddress) -> Result<ExportAddress, VolumesError> {
        let addresses = || self.report.exports.iter().map(|export| &export.address);
        let found = addresses().find(|address| address.is_meant_by(wanted));
        found.cloned().ok_or_else(|| VolumesError::NotExported {
            volume: self.config.name.clone(),
            address: wanted.clone(),
            others: addresses().cloned().collect(),
        })
    }

    /// The process serves it no more, or is never told of it again.
    fn forget_export(&mut self, address: &ExportAddress) {
        self.report.exports.retain(|export| export.address != *address);
        self.entrances.retain(|entrance| entrance.address() != *address);
    }

    /// Takes the process's answer on the export that it had to close.
    pub(super) fn unexported(&mut self, done: Result<(), String>) {
        // Nobody waits any more, or the export is a file, which is gone by now.
        let Unexporting::Asked(address) = &self.unexporting else { return };
        let address = address.clone();
        self.unexporting = match done {
            Ok(()) => {
                self.forget_export(&address);
                Unexporting::Done
            }
            Err(attached) => {
                Unexporting::Refused(format!("{attached}; --force cuts off whoever is"))
            }
        };
    }

    /// The process has ended before it said anything of it.
    pub(super) fn unexporting_is_over(&mut self) {
        if let Unexporting::Asked(_) = self.unexporting {
            self.unexporting = Unexporting::Refused("its process ended; try again".to_owned());
        }
    }
}
