//! Reads and resizes a domain through libvirt.
//!
//! The link reads the device's size with `virsh dumpxml`, in which libvirt keeps QEMU's last
//! answer. It does not use QEMU's monitor, since libvirt would mark the domain as tainted. No
//! command here needs libvirt's list of domains, which stands still while a domain waits in a hook.

use crate::agent::links::monitor::{PATIENCE, Shared, Sizes};
use crate::agent::links::reminders::Reminders;
use hecaton_vm::create::Memory;
use hecaton_vm::domain::harvest::Domain;
use hecaton_vm::memory_device::MemoryDevice;
use hecaton_vm::virsh::{Virsh, VirshError};

/// The way to it.
#[derive(Debug)]
pub(crate) struct DomainLink {
    virsh: Virsh,
    uuid: String,
    /// libvirt's name for its device, once it is known.
    alias: String,
    reminders: Reminders,
}

impl DomainLink {
    pub(crate) fn new(virsh: Virsh, uuid: String) -> DomainLink {
        DomainLink { virsh, uuid, alias: String::new(), reminders: Reminders::default() }
    }

    /// Does what is to be done. The sizes that were asked for, and the device after that.
    pub(crate) fn visit(&mut self, desk: &Shared) -> Result<(Sizes, Vec<MemoryDevice>), String> {
        self.visited(desk).map_err(|error| error.to_string())
    }

    fn visited(&mut self, desk: &Shared) -> Result<(Sizes, Vec<MemoryDevice>), LinkError> {
        if desk.takes_power_down() {
            self.ask(desk, "shutdown", &[])?;
        }
        if desk.takes_quit() {
            self.ask(desk, "destroy", &[])?;
        }
        if self.alias.is_empty() {
            // Before anything can be asked of it.
            self.device(desk)?;
        }
        if desk.takes_remind() {
            self.reminders.note(&desk.devices());
        }
        let sizes = desk.sizes();
        for (device, (_, bytes)) in &sizes {
            self.reminders.forget(device);
            let known = desk.devices().into_iter().find(|known| known.id == *device);
            match known.and_then(|known| known.check(*bytes).err()) {
                Some(refused) => {
                    tracing::warn!(uuid = self.uuid, bytes, error = %refused, "not resized");
                }
                None => self.request_size(desk, *bytes)?,
            }
        }
        let mut reminders = std::mem::take(&mut self.reminders);
        let said = reminders.say(|_, bytes| self.request_size(desk, bytes));
        self.reminders = reminders;
        said?;
        Ok((sizes, vec![self.device(desk)?]))
    }

    fn request_size(&mut self, desk: &Shared, bytes: u64) -> Result<(), LinkError> {
        let kib = (bytes >> 10).to_string();
        let more = ["--live", "--alias", self.alias.as_str(), "--requested-size", kib.as_str()];
        match self.ask(desk, "update-memory-device", &more) {
            Ok(_) => Ok(()),
            Err(error @ VirshError::Failed { .. }) if self.device(desk).is_ok() => {
                // It is there, and so is libvirt: this was refused.
                tracing::warn!(uuid = self.uuid, bytes, %error, "not resized");
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    fn device(&mut self, desk: &Shared) -> Result<MemoryDevice, LinkError> {
        let xml = self.ask(desk, "dumpxml", &[])?;
        let domain = Domain::read(&xml).map_err(|error| LinkError::Unfit(error.to_string()))?;
        let no_more = || LinkError::Unfit("it is no harvest VM any more".to_owned());
        let growing = domain.harvest.ok_or_else(no_more)?;
        self.alias = growing.device.id;
        Ok(MemoryDevice { id: Memory::device_id(0), ..growing.device })
    }

    fn ask(&self, desk: &Shared, word: &str, more: &[&str]) -> Result<String, VirshError> {
        let words = [&[word, "--domain", self.uuid.as_str()], more].concat();
        self.virsh.ask(&words, PATIENCE, || {
            desk.has_failed();
            !desk.is_over()
        })
    }
}

#[derive(Debug, thiserror::Error)]
enum LinkError {
    #[error(transparent)]
    Virsh(#[from] VirshError),
    #[error("{0}")]
    Unfit(String),
}
