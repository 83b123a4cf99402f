//! Volumes of which this host's kernel makes disks, for `hecaton run`.

use anyhow::{Context as _, bail};
use hecaton_block::ublk;
use hecaton_node::socket::client::NodeClient;
use hecaton_node::socket::message::{CreateVolume, Export};
use hecaton_node::volumes::ExportAddress;
use std::path::{Path, PathBuf};

/// A volume of a node.
pub(super) struct Volume {
    node: PathBuf,
    name: String,
}

impl Volume {
    pub(super) fn create(node: PathBuf, wish: CreateVolume) -> anyhow::Result<Volume> {
        let name = wish.name.clone();
        connect(&node)?.create_volume(wish)?;
        Ok(Volume { node, name })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Makes a block device of it, where the kernel can do that.
    pub(super) fn block_device(&self) -> anyhow::Result<PathBuf> {
        ublk::check()?;
        match self.export(ExportAddress::Ublk(None))? {
            ExportAddress::Ublk(Some(number)) => Ok(ublk::disk::path(number)),
            other => bail!("the node exports a block device at {other}"),
        }
    }

    /// Makes a file of it, for a loop device.
    pub(super) fn file(&self, path: &Path) -> anyhow::Result<()> {
        self.export(ExportAddress::Fuse(path.to_owned())).map(drop)
    }

    pub(super) fn delete(&self) -> anyhow::Result<()> {
        Ok(NodeClient::connect(&self.node)?.delete_volume(&self.name)?)
    }

    fn export(&self, address: ExportAddress) -> anyhow::Result<ExportAddress> {
        let export = Export {
            volume: self.name.clone(),
            address,
            read_only: false,
            tls: None,
            insecure: false,
            uring: false,
        };
        Ok(connect(&self.node)?.export_volume(export)?)
    }
}

fn connect(node: &Path) -> anyhow::Result<NodeClient> {
    NodeClient::connect(node).context("the node does not answer")
}
