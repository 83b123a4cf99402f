//! A libvirt domain, changed so that its RAM can be paged, and changed back.
//!
//! XML in, XML out. The text is spliced and not written anew, so that a diff shows what is changed
//! and nothing else. A note in the domain's metadata, under a namespace of our own, has the earlier
//! values; libvirt keeps it. With the note, [`restore`] gives back what [`edit`] was given.
//!
//! ```xml
//! <metadata><hecaton:vm xmlns:hecaton="urn:hecaton:vm:1" added="…"/></metadata>
//! <memoryBacking><source type="memfd"/><access mode="shared"/></memoryBacking>
//! <qemu:commandline>
//!   <qemu:arg value="-qmp"/><qemu:arg value="unix:…,server=on,wait=off"/>
//!   <qemu:env name="LD_PRELOAD" value="…/libhecaton.so"/>
//!   <qemu:env name="HECATON_NODE" value="…/node.sock"/>   <!-- and what the node is asked for -->
//! </qemu:commandline>
//! ```

mod edits;
pub mod harvest;
#[cfg(test)]
mod tests;

use crate::guest_ram;
use crate::option::OptionError;
use crate::refusal::{Reason, Refusal};
use crate::words;
use edits::{Edits, escape};
use roxmltree::{Document, Node};
use std::collections::BTreeMap;
use std::path::Path;

/// libvirt's namespace for what is passed on to QEMU.
const QEMU_NAMESPACE: &str = "http://libvirt.org/schemas/domain/qemu/1.0";

/// Ours, in the metadata.
const NAMESPACE: &str = "urn:hecaton:vm:1";

/// How the values that name our monitors end.
const MONITOR_SUFFIX: &str = ".qmp,server=on,wait=off";

/// The dynamic linker's variable.
const PRELOAD: &str = "LD_PRELOAD";

/// Longest domain that is taken.
pub const MAX_DOMAIN_BYTES: usize = 4 << 20;

/// Additions to a domain.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    /// `libhecaton.so`.
    pub library: &'a Path,
    /// Where our monitor is to listen; the name ends in `.qmp`, by which it is known again.
    pub monitor: &'a Path,
    /// The library's variables, with their values.
    pub variables: &'a [(&'a str, String)],
}

/// Why a domain is not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DomainError {
    /// It is no XML, or not as a domain is.
    #[error("the domain's XML cannot be read: {0}")]
    Xml(String),
    /// It is no domain of QEMU.
    #[error("this is a domain of type `{0}`; only `kvm` and `qemu` can be paged")]
    NotQemu(String),
    /// Parts of it are refused; all of them are named.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Refused(Vec<Refusal>),
    /// A `<qemu:arg>` cannot be read.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// How its memory is made up is its own matter.
    #[error(
        "it has NUMA cells or memory devices of its own; add a virtio-mem device and {0} in its <metadata> by hand \
         (`virsh edit`)"
    )]
    OwnMemory(String),
    /// It was not changed by us.
    #[error("the domain is not set up for Hecaton; there is nothing to remove")]
    NotOurs,
}

/// Changes a domain; one that was changed before is changed back first.
pub fn edit(xml: &str, wish: Wish<'_>) -> Result<String, DomainError> {
    let xml = match restore(xml) {
        Ok(plain) => plain,
        Err(DomainError::NotOurs) => xml.to_owned(),
        Err(error) => return Err(error),
    };
    let document = parse(&xml)?;
    let domain = document.root_element();
    let refused = refusals(&xml, domain)?;
    if !refused.is_empty() {
        return Err(DomainError::Refused(refused));
    }
    let mut edits = Edits::new(&xml);
    let mut note = Note::default();
    back_memory(domain, &mut edits, &mut note)?;
    add_command_line(domain, wish, &mut edits, &mut note);
    write_note(domain, &mut edits, note, NAMESPACE);
    Ok(edits.apply())
}

/// Changes a domain back.
pub fn restore(xml: &str) -> Result<String, DomainError> {
    let document = parse(xml)?;
    let domain = document.root_element();
    let Some(ours) = find_note(domain) else { return Err(DomainError::NotOurs) };
    let note = Note::read(ours);
    let mut edits = Edits::new(xml);
    remove_note(ours, &note, &mut edits);
    if let Some(backing) = child(domain, "memoryBacking") {
        restore_memory(backing, &note, &mut edits);
    }
    if let Some(commandline) = qemu_commandline(domain) {
        let whole = restore_command_line(commandline, &note, &mut edits);
        if whole && note.has("namespace") {
            edits.remove_namespace(domain, QEMU_NAMESPACE);
        }
    }
    Ok(edits.apply())
}

/// Returns the change as a unified diff, for people.
pub fn diff(name: &str, before: &str, after: &str) -> String {
    similar::TextDiff::from_lines(before, after)
        .unified_diff()
        .context_radius(3)
        .header(&format!("{name} now"), &format!("{name} then"))
        .to_string()
}

fn parse(xml: &str) -> Result<Document<'_>, DomainError> {
    if xml.len() > MAX_DOMAIN_BYTES {
        return Err(DomainError::Xml(format!("it is longer than {MAX_DOMAIN_BYTES} bytes")));
    }
    let document = Document::parse(xml).map_err(|error| DomainError::Xml(error.to_string()))?;
    let domain = document.root_element();
    if domain.tag_name().name() != "domain" {
        let name = domain.tag_name().name();
        return Err(DomainError::Xml(format!("its first element is <{name}>, not <domain>")));
    }
    match domain.attribute("type") {
        Some("kvm" | "qemu") => Ok(document),
        other => Err(DomainError::NotQemu(other.unwrap_or_default().to_owned())),
    }
}

fn child<'a>(parent: Node<'a, 'a>, name: &str) -> Option<Node<'a, 'a>> {
    parent.children().find(|node| node.is_element() && node.tag_name().name() == name)
}

fn elements<'a>(parent: Node<'a, 'a>) -> impl Iterator<Item = Node<'a, 'a>> {
    parent.children().filter(Node::is_element)
}

fn qemu_commandline<'a>(domain: Node<'a, 'a>) -> Option<Node<'a, 'a>> {
    domain.children().find(|node| node.has_tag_name((QEMU_NAMESPACE, "commandline")))
}

fn find_note<'a>(domain: Node<'a, 'a>) -> Option<Node<'a, 'a>> {
    child(domain, "metadata")?.children().find(|node| node.has_tag_name((NAMESPACE, "vm")))
}

/// All that cannot be with a paged guest.
fn refusals(xml: &str, domain: Node<'_, '_>) -> Result<Vec<Refusal>, DomainError> {
    let mut refused = Vec::new();
    for node in domain.descendants().filter(Node::is_element) {
        if let Some(reason) = of_element(node) {
            refused.push(Refusal::new(start_tag(xml, node), reason));
        }
    }
    if let Some(commandline) = qemu_commandline(domain) {
        let arguments: Vec<_> = commandline
            .children()
            .filter(|node| node.has_tag_name((QEMU_NAMESPACE, "arg")))
            .filter_map(|node| node.attribute("value").map(Into::into))
            .collect();
        refused.extend(guest_ram::refusals(&words::parse(&arguments))?);
    }
    Ok(refused)
}

fn of_element(node: Node<'_, '_>) -> Option<Reason> {
    let attribute = |name| node.attribute(name).unwrap_or_default();
    let parent = node.parent_element().map_or("", |parent| parent.tag_name().name());
    match (parent, node.tag_name().name()) {
        ("memoryBacking", "hugepages") => Some(Reason::HugePages),
        ("memoryBacking", "locked") => Some(Reason::Locked),
        ("memoryBacking", "allocation") if attribute("mode") == "immediate" => {
            Some(Reason::Preallocated)
        }
        ("numa", "cell") if attribute("memAccess") == "private" => Some(Reason::Private),
        ("domain", "launchSecurity") => Some(Reason::Encrypted),
        ("devices", "memory") => match attribute("model") {
            "nvdimm" | "virtio-pmem" => Some(Reason::FileOnDisk),
            "sgx-epc" => Some(Reason::Encrypted),
            _ if attribute("access") == "private" => Some(Reason::Private),
            _ => None,
        },
        ("devices", "hostdev") => match attribute("type") {
            "pci" | "mdev" => Some(Reason::PinnedByDevice),
            "scsi" | "scsi_host" => Some(Reason::DirectIo),
            _ => None,
        },
        ("devices", "interface") => match attribute("type") {
            "hostdev" | "vdpa" => Some(Reason::PinnedByDevice),
            "vhostuser" => Some(Reason::MappedElsewhere),
            _ => None,
        },
        ("devices", "disk") => match (attribute("type"), attribute("device")) {
            ("nvme" | "vhostvdpa", _) => Some(Reason::PinnedByDevice),
            ("vhostuser", _) => Some(Reason::MappedElsewhere),
            (_, "lun") => Some(Reason::DirectIo),
            _ => None,
        },
        ("disk", "driver") => {
            let direct =
                matches!(attribute("cache"), "none" | "directsync") || attribute("io") == "native";
            direct.then_some(Reason::DirectIo)
        }
        ("filesystem", "driver") if attribute("type") == "virtiofs" => {
            Some(Reason::MappedElsewhere)
        }
        ("video", "driver") if attribute("name") == "vhostuser" => Some(Reason::MappedElsewhere),
        ("video", "model") if attribute("blob") == "on" => Some(Reason::PinnedByDevice),
        ("devices", "shmem") => Some(Reason::MappedElsewhere),
        _ => None,
    }
}

/// An element without what is in it, for people.
fn start_tag(xml: &str, node: Node<'_, '_>) -> String {
    let text = &xml[node.range()];
    let end = text.find('>').map_or(text.len(), |end| end + 1);
    text[..end].split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Record of the changes, which [`restore`] undoes.
#[derive(Debug, Default)]
struct Note {
    /// Elements that were not there.
    added: Vec<&'static str>,
    /// Those of a note that was read.
    added_then: Vec<String>,
    /// Values that were there, by element or variable.
    was: BTreeMap<String, String>,
}

impl Note {
    fn read(node: Node<'_, '_>) -> Note {
        let added = node.attribute("added").unwrap_or_default();
        let was = node
            .attributes()
            .filter_map(|attribute| {
                let name = attribute.name().strip_suffix("-was")?;
                Some((name.to_owned(), attribute.value().to_owned()))
            })
            .collect();
        Note { added: Vec::new(), added_then: added.split(' ').map(str::to_owned).collect(), was }
    }

    fn has(&self, added: &str) -> bool {
        self.added_then.iter().any(|name| name == added)
    }
}

/// Takes a note out, and the metadata if they were made for it.
fn remove_note(ours: Node<'_, '_>, note: &Note, edits: &mut Edits<'_>) {
    let metadata = ours.parent_element().filter(|_| note.has("metadata"));
    match metadata.filter(|metadata| elements(*metadata).all(|node| node == ours)) {
        Some(metadata) => edits.remove(metadata),
        None => edits.remove(ours),
    }
}

/// Notes what [`restore`] must know, in an element of this namespace.
fn write_note(domain: Node<'_, '_>, edits: &mut Edits<'_>, mut note: Note, namespace: &str) {
    let metadata = child(domain, "metadata");
    if metadata.is_none() {
        note.added.push("metadata");
    }
    let mut element = format!("<hecaton:vm xmlns:hecaton=\"{namespace}\"");
    element += &format!(" added=\"{}\"", note.added.join(" "));
    for (name, value) in &note.was {
        element += &format!(" {name}-was=\"{}\"", escape(value));
    }
    element += "/>";
    match metadata {
        Some(metadata) => edits.append(metadata, &[element]),
        None => {
            // libvirt itself writes it after these.
            let after = ["description", "title", "genid", "uuid", "name"];
            let after = after.iter().find_map(|name| child(domain, name));
            let lines = ["<metadata>".to_owned(), format!("  {element}"), "</metadata>".to_owned()];
            edits.insert_after(after, domain, &lines);
        }
    }
}

fn back_memory(
    domain: Node<'_, '_>,
    edits: &mut Edits<'_>,
    note: &mut Note,
) -> Result<(), DomainError> {
    let source = "<source type=\"memfd\"/>".to_owned();
    let access = "<access mode=\"shared\"/>".to_owned();
    let Some(backing) = child(domain, "memoryBacking") else {
        note.added.push("memoryBacking");
        let after = ["memtune", "currentMemory", "memory"];
        let after = after.iter().find_map(|name| child(domain, name));
        let after = after.ok_or_else(|| DomainError::Xml("it has no <memory>".to_owned()))?;
        let lines = [
            "<memoryBacking>".to_owned(),
            format!("  {source}"),
            format!("  {access}"),
            "</memoryBacking>".to_owned(),
        ];
        edits.insert_after(Some(after), domain, &lines);
        return Ok(());
    };
    let mut missing = Vec::new();
    for (name, attribute, wanted, element) in
        [("source", "type", "memfd", source), ("access", "mode", "shared", access)]
    {
        match child(backing, name) {
            Some(node) => {
                let before = node.attribute(attribute).unwrap_or_default();
                if before != wanted {
                    note.was.insert(name.to_owned(), before.to_owned());
                    edits.set_attribute(node, attribute, wanted);
                }
            }
            None => {
                note.added.push(name);
                missing.push(element);
            }
        }
    }
    edits.append(backing, &missing);
    Ok(())
}

fn add_command_line(domain: Node<'_, '_>, wish: Wish<'_>, edits: &mut Edits<'_>, note: &mut Note) {
    let prefix = domain.lookup_prefix(QEMU_NAMESPACE).unwrap_or("qemu").to_owned();
    let existing = qemu_commandline(domain);
    let preloaded = existing.and_then(|commandline| variable(commandline, PRELOAD));
    let mut preload = wish.library.to_string_lossy().into_owned();
    if let Some(before) = preloaded.and_then(|node| node.attribute("value")) {
        note.was.insert("preload".to_owned(), before.to_owned());
        preload += &format!(":{before}");
    }
    let monitor = wish.monitor.to_string_lossy().replace(',', ",,");
    let argument = |value: &str| format!("<{prefix}:arg value=\"{}\"/>", escape(value));
    let mut lines = vec![argument("-qmp"), argument(&format!("unix:{monitor},server=on,wait=off"))];
    let set = |name: &str, value: &str| {
        format!("<{prefix}:env name=\"{name}\" value=\"{}\"/>", escape(value))
    };
    match preloaded {
        Some(node) => edits.set_attribute(node, "value", &preload),
        None => lines.push(set(PRELOAD, &preload)),
    }
    lines.extend(wish.variables.iter().map(|(name, value)| set(name, value)));
    match existing {
        Some(commandline) => edits.append(commandline, &lines),
        None => {
            note.added.push("commandline");
            if domain.lookup_prefix(QEMU_NAMESPACE).is_none() {
                note.added.push("namespace");
                edits.add_namespace(domain, &prefix, QEMU_NAMESPACE);
            }
            let mut element = vec![format!("<{prefix}:commandline>")];
            element.extend(lines.into_iter().map(|line| format!("  {line}")));
            element.push(format!("</{prefix}:commandline>"));
            edits.append(domain, &element);
        }
    }
}

fn variable<'a>(commandline: Node<'a, 'a>, name: &str) -> Option<Node<'a, 'a>> {
    commandline.children().find(|node| {
        node.has_tag_name((QEMU_NAMESPACE, "env")) && node.attribute("name") == Some(name)
    })
}

/// Undoes [`back_memory`]. Elements that others have added since stay, and so does their parent.
fn restore_memory(backing: Node<'_, '_>, note: &Note, edits: &mut Edits<'_>) {
    let parts = [("source", "type"), ("access", "mode")];
    let ours = |node: Node<'_, '_>| {
        parts
            .iter()
            .any(|(name, _)| node.tag_name().name() == *name && child(backing, name) == Some(node))
    };
    if note.has("memoryBacking") && elements(backing).all(ours) {
        edits.remove(backing);
        return;
    }
    for (element, attribute) in parts {
        let Some(node) = child(backing, element) else { continue };
        if note.has(element) || note.has("memoryBacking") {
            edits.remove(node);
        } else if let Some(before) = note.was.get(element) {
            edits.set_attribute(node, attribute, before);
        }
    }
}

/// `true` if all of it was ours and is gone.
fn restore_command_line(commandline: Node<'_, '_>, note: &Note, edits: &mut Edits<'_>) -> bool {
    let children: Vec<_> = elements(commandline).collect();
    let value = |node: &Node<'_, '_>| node.attribute("value").unwrap_or_default().to_owned();
    let is_monitor = |node: &Node<'_, '_>| value(node).ends_with(MONITOR_SUFFIX);
    let mut ours = Vec::new();
    for (index, node) in children.iter().enumerate() {
        let name = node.attribute("name").unwrap_or_default();
        let next_is_monitor = children.get(index + 1).is_some_and(is_monitor);
        let argument = node.tag_name().name() == "arg";
        if argument && (value(node) == "-qmp" && next_is_monitor || is_monitor(node))
            || name.starts_with("HECATON_")
            || name == PRELOAD && !note.was.contains_key("preload")
        {
            ours.push(*node);
        }
    }
    if note.has("commandline") && ours.len() == children.len() {
        edits.remove(commandline);
        return true;
    }
    for node in ours {
        edits.remove(node);
    }
    if let (Some(node), Some(before)) = (variable(commandline, PRELOAD), note.was.get("preload")) {
        edits.set_attribute(node, "value", before);
    }
    false
}
