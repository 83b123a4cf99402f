//! Volumes that other nodes read by themselves, and those of other nodes that are read here
//! ([`hecaton_block::readers`]).
//!
//! Where a volume is shared is an export like others: the node keeps the socket, so that readers
//! find the next process where the one before was. A volume that is read here has a process like
//! others, too, which is started again; but it is another node's, and all that it is exported as is
//! to be read only.

use super::{ExportAddress, Volume, Volumes, VolumesError};
use crate::causes::with_causes;
use crate::socket::message::AttachVolume;
use hecaton_block::VolumeConfig;
use hecaton_block::readers::{SharedBy, describe};
use hecaton_memory::pages_to_bytes;
use std::net::SocketAddr;
use std::path::Path;

impl Volumes {
    /// Reads a volume that another node shares; returns when it is served.
    pub(super) fn read(&self, wish: &AttachVolume) -> Result<(), VolumesError> {
        let name = &wish.volume;
        if self.table().contains_key(name) {
            return Err(VolumesError::IsAttached(name.clone()));
        }
        let Some((node, address)) = wish.from.clone() else {
            return Err(VolumesError::Unknown(name.clone()));
        };
        let from = SharedBy { node, address };
        let site = self.0.donors.site().clone();
        let tls_dir = self.0.donors.tls_dir().map(Path::to_owned);
        let described = match describe(name, &from, &site.host, tls_dir.as_deref()) {
            Ok(described) => described,
            Err(error) => {
                let (volume, reason) = (name.clone(), with_causes(&error));
                return Err(VolumesError::NotAttached { volume, reason });
            }
        };
        let config = VolumeConfig {
            site,
            tls_dir,
            // Those are its owner's to keep up.
            scrub_bytes_per_s: 0,
            write_buffer_bytes: None,
            reads_from: Some(from),
            ..described.config
        };
        self.enter(config, pages_to_bytes(described.pages))?;
        self.start(name.clone())
    }

    /// Ends that a volume of another node is read here.
    pub(super) fn read_no_more(&self, name: &str) -> Result<(), VolumesError> {
        let is_own = self.with(name, |volume| volume.config.reads_from.is_none())?;
        if is_own {
            let (volume, reason) =
                (name.to_owned(), "it is this node's; say with --to to which node it is to go");
            return Err(VolumesError::NotDetached { volume, reason: reason.to_owned() });
        }
        self.end(name)
    }

    /// Where other nodes are to come for a volume; refused if they cannot read it.
    pub(super) fn for_nodes(
        &self,
        name: &str,
        wanted: Option<SocketAddr>,
        insecure: bool,
    ) -> Result<SocketAddr, VolumesError> {
        let refused = |reason: &str| {
            Err(VolumesError::NotShared { volume: name.to_owned(), reason: reason.to_owned() })
        };
        let has_tls = self.0.donors.tls_dir().is_some();
        if let Some(reason) = self.with(name, |volume| volume.why_not_shared(has_tls))? {
            return refused(&reason);
        }
        match self.address_for_nodes(wanted) {
            None => refused(
                "this node has no donors whose address could be used: say with --listen where other nodes are to connect",
            ),
            Some(address) if address.ip().is_unspecified() => {
                refused(&format!("{address} is no address to connect to: name one of this host's"))
            }
            // As nobody else is asked where to listen, at donors' address it is no more open than
            // they are.
            Some(address)
                if wanted.is_some() && !address.ip().is_loopback() && !insecure && !has_tls =>
            {
                refused(&format!(
                    "{address} can be reached from other hosts, and the node has no certificate; add --insecure if the \
                     network is trusted"
                ))
            }
            Some(address) => Ok(address),
        }
    }
}

impl Volume {
    /// Whether all of its exports are to be read only.
    pub(super) fn is_read_only(&self) -> bool {
        self.config.snapshot_of.is_some() || self.config.reads_from.is_some()
    }

    /// Refused if it is another node's, and only read here.
    pub(super) fn check_own(&self) -> Result<(), VolumesError> {
        match &self.config.reads_from {
            None => Ok(()),
            Some(SharedBy { node, .. }) => {
                let (volume, node) = (self.config.name.clone(), node.clone());
                Err(VolumesError::IsAnothers { volume, node })
            }
        }
    }

    fn why_not_shared(&self, has_tls: bool) -> Option<String> {
        if let Some(reason) = self.config.why_not_shared() {
            return Some(reason);
        }
        let is_shared = |address: &ExportAddress| matches!(address, ExportAddress::Nodes(_));
        let shared = self.report.exports.iter().find(|export| is_shared(&export.address));
        if let Some(shared) = shared {
            return Some(format!("it is already, at {}", shared.address));
        }
        (self.config.encrypt && !has_tls).then(|| {
            "it is encrypted, and its key goes to another node by TLS only: nodes need certificates for that \
             (`hecaton pki`)"
                .to_owned()
        })
    }
}
