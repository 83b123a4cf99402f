//! A libvirt domain as the host's agent counts it: one that runs, or is about to.
//!
//! A domain is a harvest VM if its metadata say so, it has a virtio-mem device, and its memory is
//! in memfds. `hecaton vm libvirt --harvest` writes the metadata. By the memfds the host sees how
//! much is resident. The domain states its own sizes: the bytes that it begins with and keeps, and
//! the size of the device. Any other domain is a regular VM that counts with its maximum.

use super::edits::Edits;
use super::{DomainError, Note, back_memory, child, elements, parse, write_note};
use crate::create::BLOCK_BYTES;
use crate::guest_port::PORT_NAME;
use crate::memory_device::MemoryDevice;
use roxmltree::Node;
use std::path::PathBuf;

/// Our namespace in the metadata of a harvest VM. libvirt wants one element for each namespace.
const NAMESPACE: &str = "urn:hecaton:harvest:1";

/// Address space that QEMU may lose to put the device where a memory block begins.
const ALIGNMENT_BYTES: u64 = 1 << 30;

/// A domain that runs, or is being started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    /// libvirt's name for it.
    pub name: String,
    /// The name that it keeps when it is renamed.
    pub uuid: String,
    /// The one NUMA node of the host that all of its memory is bound to, if it is.
    pub host_node: Option<u32>,
    /// Bytes that the domain has as long as it runs.
    pub base_bytes: u64,
    /// How a harvest VM grows; `None` for a regular VM.
    pub harvest: Option<Growing>,
    /// Why a domain that is marked as a harvest VM does not qualify.
    pub unfit: Option<String>,
}

/// How a domain grows and shrinks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Growing {
    /// Its virtio-mem device. The id is libvirt's alias for it, empty as long as the domain is not
    /// started.
    pub device: MemoryDevice,
    /// Where the port of the manager inside it listens, if it has one.
    pub guest_port: Option<PathBuf>,
}

impl Domain {
    /// The most that it may have.
    pub fn max_bytes(&self) -> u64 {
        self.base_bytes + self.harvest.as_ref().map_or(0, |growing| growing.device.max_bytes)
    }

    /// Reads what libvirt says of a domain (`virsh dumpxml`, or what its hooks are given).
    pub fn read(xml: &str) -> Result<Domain, DomainError> {
        let document = parse(xml)?;
        let domain = document.root_element();
        let missing = |what: &str| DomainError::Xml(format!("it has no <{what}>"));
        let text = |name: &str| child(domain, name).and_then(|node| node.text());
        let name = text("name").ok_or_else(|| missing("name"))?.to_owned();
        let uuid = text("uuid").map(str::trim).filter(|text| is_uuid(text));
        let uuid = uuid.ok_or_else(|| missing("uuid"))?.to_owned();
        // `<memory>` includes the maximum of the devices.
        let all_bytes = child(domain, "memory").and_then(bytes).ok_or_else(|| missing("memory"))?;
        let host_node = host_node(domain);
        let (harvest, unfit) = match find_mark(domain) {
            None => (None, None),
            Some(_) => match growing(domain) {
                Ok(growing) => (Some(growing), None),
                Err(reason) => (None, Some(reason)),
            },
        };
        let more_bytes = harvest.as_ref().map_or(0, |growing| growing.device.max_bytes);
        let base_bytes = all_bytes.saturating_sub(more_bytes).next_multiple_of(BLOCK_BYTES);
        Ok(Domain { name, uuid, host_node, base_bytes, harvest, unfit })
    }
}

/// Whether it is a UUID as libvirt writes it, which can stand in a file's name.
pub fn is_uuid(text: &str) -> bool {
    text.len() == 36 && text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
}

fn growing(domain: Node<'_, '_>) -> Result<Growing, String> {
    let memfd = child(domain, "memoryBacking").and_then(|backing| child(backing, "source"));
    if memfd.and_then(|source| source.attribute("type")) != Some("memfd") {
        return Err("its <memoryBacking> has no <source type='memfd'/>, by which the host sees what is in memory".into());
    }
    let devices = child(domain, "devices");
    let memory: Vec<_> = devices
        .into_iter()
        .flat_map(elements)
        .filter(|node| node.has_tag_name("memory") && node.attribute("model") == Some("virtio-mem"))
        .collect();
    let [memory] = memory[..] else {
        return Err(format!("it has {} virtio-mem devices, and one is needed", memory.len()));
    };
    let target = child(memory, "target");
    let size = |name: &str| target.and_then(|target| child(target, name)).and_then(bytes);
    let (max_bytes, block_bytes) = match (size("size"), size("block")) {
        (Some(size), Some(block)) if block > 0 && size > 0 => (size, block),
        _ => return Err("its virtio-mem device has no <size> or no <block>".to_owned()),
    };
    let requested_bytes = size("requested").unwrap_or(0);
    let alias = child(memory, "alias").and_then(|alias| alias.attribute("name"));
    let node = target.and_then(|target| child(target, "node")).and_then(|node| node.text());
    let device = MemoryDevice {
        id: alias.unwrap_or_default().to_owned(),
        backend: String::new(),
        guest_node: node.and_then(|node| node.trim().parse().ok()).unwrap_or(0),
        block_bytes,
        max_bytes,
        requested_bytes,
        plugged_bytes: size("current").unwrap_or(0),
    };
    let port = devices.and_then(find_port).and_then(|port| child(port, "source"));
    let guest_port = port.and_then(|source| source.attribute("path")).map(PathBuf::from);
    Ok(Growing { device, guest_port })
}

fn find_mark<'a>(domain: Node<'a, 'a>) -> Option<Node<'a, 'a>> {
    child(domain, "metadata")?.children().find(|node| node.has_tag_name((NAMESPACE, "vm")))
}

fn find_port<'a>(devices: Node<'a, 'a>) -> Option<Node<'a, 'a>> {
    elements(devices).find(|node| {
        let target = child(*node, "target").and_then(|target| target.attribute("name"));
        node.has_tag_name("channel") && target == Some(PORT_NAME)
    })
}

/// The one node that the memory is bound to.
fn host_node(domain: Node<'_, '_>) -> Option<u32> {
    let memory = child(child(domain, "numatune")?, "memory")?;
    // A preference is none to count on.
    let is_strict = matches!(memory.attribute("mode"), None | Some("strict"));
    memory.attribute("nodeset").filter(|_| is_strict)?.trim().parse().ok()
}

/// Reads an element's text and unit as bytes. libvirt writes KiB, people write any unit.
fn bytes(node: Node<'_, '_>) -> Option<u64> {
    let number: u64 = node.text()?.trim().parse().ok()?;
    let unit = match node.attribute("unit").unwrap_or("KiB") {
        "b" | "bytes" => 1,
        "KB" => 1000,
        "k" | "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "M" | "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "G" | "GiB" => 1 << 30,
        "TB" => 1_000_000_000_000,
        "T" | "TiB" => 1 << 40,
        _ => return None,
    };
    number.checked_mul(unit)
}

/// Makes a domain a harvest VM that begins with `min_bytes` and may grow to `max_bytes`; one that
/// was made one before is changed back first.
pub fn make(xml: &str, min_bytes: u64, max_bytes: u64) -> Result<String, DomainError> {
    let xml = match restore(xml) {
        Ok(plain) => plain,
        Err(DomainError::NotOurs) => xml.to_owned(),
        Err(error) => return Err(error),
    };
    let document = parse(&xml)?;
    let domain = document.root_element();
    let missing = |what: &str| DomainError::Xml(format!("it has no <{what}>"));
    let devices = child(domain, "devices").ok_or_else(|| missing("devices"))?;
    let has_own = elements(devices).any(|node| node.has_tag_name("memory"));
    let cpu = child(domain, "cpu");
    if has_own || cpu.is_some_and(|cpu| child(cpu, "numa").is_some()) {
        return Err(DomainError::OwnMemory(mark_text()));
    }
    let mut edits = Edits::new(&xml);
    let mut note = Note::default();
    let memory = child(domain, "memory").ok_or_else(|| missing("memory"))?;
    let kib = |bytes: u64| bytes >> 10;
    for (name, bytes_then) in [("memory", max_bytes), ("currentMemory", min_bytes)] {
        if let Some(node) = child(domain, name) {
            let was = bytes(node).ok_or_else(|| missing(name))?;
            note.was.insert(name.to_owned(), kib(was).to_string());
            set_kib(node, &kib(bytes_then).to_string(), &mut edits);
        }
    }
    let address_space = kib(max_bytes + ALIGNMENT_BYTES);
    if child(domain, "maxMemory").is_none() {
        note.added.push("maxMemory");
        let line = format!("<maxMemory slots=\"1\" unit=\"KiB\">{address_space}</maxMemory>");
        edits.insert_before(memory, &[line]);
    }
    back_memory(domain, &mut edits, &mut note)?;
    let vcpus = child(domain, "vcpu").and_then(|node| node.text()?.trim().parse::<u32>().ok());
    let last = vcpus.unwrap_or(1).max(1) - 1;
    let cpus = if last == 0 { "0".to_owned() } else { format!("0-{last}") };
    let cell =
        format!("  <cell id=\"0\" cpus=\"{cpus}\" memory=\"{}\" unit=\"KiB\"/>", kib(min_bytes));
    let numa = ["<numa>".to_owned(), cell, "</numa>".to_owned()];
    match cpu {
        Some(cpu) => {
            note.added.push("numa");
            edits.append(cpu, &numa);
        }
        None => {
            note.added.push("cpu");
            let lines: Vec<String> = std::iter::once("<cpu>".to_owned())
                .chain(numa.iter().map(|line| format!("  {line}")))
                .chain(["</cpu>".to_owned()])
                .collect();
            edits.insert_before(devices, &lines);
        }
    }
    note.added.push("virtio-mem");
    let device = [
        "<memory model=\"virtio-mem\">".to_owned(),
        "  <target>".to_owned(),
        format!("    <size unit=\"KiB\">{}</size>", kib(max_bytes - min_bytes)),
        "    <node>0</node>".to_owned(),
        format!("    <block unit=\"KiB\">{}</block>", kib(BLOCK_BYTES)),
        "    <requested unit=\"KiB\">0</requested>".to_owned(),
        "  </target>".to_owned(),
        "</memory>".to_owned(),
    ];
    let mut lines = device.to_vec();
    if find_port(devices).is_none() {
        note.added.push("channel");
        lines.push("<channel type=\"unix\">".to_owned());
        lines.push(format!("  <target type=\"virtio\" name=\"{PORT_NAME}\"/>"));
        lines.push("</channel>".to_owned());
    }
    edits.append(devices, &lines);
    write_note(domain, &mut edits, note, NAMESPACE);
    Ok(edits.apply())
}

/// Changes a domain back. Elements that libvirt added itself to complete ours stay: a controller,
/// and addresses.
pub fn restore(xml: &str) -> Result<String, DomainError> {
    let document = parse(xml)?;
    let domain = document.root_element();
    let Some(mark) = find_mark(domain) else { return Err(DomainError::NotOurs) };
    let note = Note::read(mark);
    let mut edits = Edits::new(xml);
    super::remove_note(mark, &note, &mut edits);
    for name in ["maxMemory", "cpu"] {
        if let Some(node) = child(domain, name).filter(|_| note.has(name)) {
            edits.remove(node);
        }
    }
    if let Some(cpu) = child(domain, "cpu")
        && let Some(numa) = child(cpu, "numa")
        && note.has("numa")
    {
        edits.remove_from(cpu, numa);
    }
    for name in ["memory", "currentMemory"] {
        if let (Some(node), Some(was)) = (child(domain, name), note.was.get(name)) {
            set_kib(node, was, &mut edits);
        }
    }
    if let Some(backing) = child(domain, "memoryBacking") {
        super::restore_memory(backing, &note, &mut edits);
    }
    if let Some(devices) = child(domain, "devices") {
        let memory = elements(devices).find(|node| node.has_tag_name("memory"));
        for (node, name) in [(memory, "virtio-mem"), (find_port(devices), "channel")] {
            if let Some(node) = node.filter(|_| note.has(name)) {
                edits.remove(node);
            }
        }
    }
    Ok(edits.apply())
}

fn set_kib(node: Node<'_, '_>, kib: &str, edits: &mut Edits<'_>) {
    if node.has_attribute("unit") {
        edits.set_attribute(node, "unit", "KiB");
    }
    edits.set_text(node, kib);
}

/// The mark, for whoever sets a domain up by hand.
fn mark_text() -> String {
    format!("<hecaton:vm xmlns:hecaton=\"{NAMESPACE}\"/>")
}

/// Setting that the guest still needs, in words for people.
pub const ADVICE: &str = "its kernel needs memhp_default_state=online_movable on its command line, or it cannot give back what it has beyond \
     its minimum";

#[cfg(test)]
mod tests {
    use super::*;

    /// As libvirt 9.0 writes a running harvest VM.
    const RUNNING: &str = include_str!("domains/harvest.xml");
    const DUMPED: &str = include_str!("domains/dumped.xml");
    const INSTALLED: &str = include_str!("domains/installed.xml");

    const M: u64 = 1 << 20;

    #[test]
    fn a_harvest_vm_has_what_it_begins_with_and_its_device() {
        let domain = Domain::read(RUNNING).expect("read");
        assert_eq!((domain.name.as_str(), domain.base_bytes), ("db", 256 * M));
        assert_eq!((domain.max_bytes(), domain.host_node), (1024 * M, None));
        assert_eq!(domain.uuid, "c658e799-9abf-47ea-9ca1-b129d4958fe3");
        let growing = domain.harvest.expect("a harvest VM");
        let device = &growing.device;
        assert_eq!((device.id.as_str(), device.block_bytes), ("virtiomem0", 2 * M));
        assert_eq!([device.requested_bytes, device.plugged_bytes], [512 * M, 128 * M]);
        let port = "/var/lib/libvirt/qemu/channel/target/domain-1-db/org.hecaton.guest.0";
        assert_eq!(growing.guest_port, Some(PathBuf::from(port)));
    }

    #[test]
    fn others_are_regular_with_all_that_they_may_have() {
        let unmarked = RUNNING.replace("<hecaton:vm ", "<hecaton:other ");
        let domain = Domain::read(&unmarked).expect("read");
        assert_eq!((domain.base_bytes, domain.harvest, domain.unfit), (1024 * M, None, None));
        for (from, to, why) in [
            ("type='memfd'", "type='anonymous'", "has no <source type='memfd'/>"),
            ("model='virtio-mem'", "model='dimm'", "has 0 virtio-mem devices"),
            ("<block unit='KiB'>2048</block>", "", "no <block>"),
        ] {
            assert!(RUNNING.contains(from));
            let domain = Domain::read(&RUNNING.replace(from, to)).expect("read");
            assert_eq!((domain.base_bytes, domain.harvest), (1024 * M, None), "{from}");
            let unfit = domain.unfit.expect(from);
            assert!(unfit.contains(why), "{unfit}");
        }
        let bound = "<numatune><memory mode='strict' nodeset='1'/></numatune><os>";
        let domain = Domain::read(&RUNNING.replace("<os>", bound)).expect("read");
        assert_eq!(domain.host_node, Some(1));
        for loose in ["mode='strict' nodeset='0-1'", "mode='preferred' nodeset='1'"] {
            let bound = format!("<numatune><memory {loose}/></numatune><os>");
            let domain = Domain::read(&RUNNING.replace("<os>", &bound)).expect("read");
            assert_eq!(domain.host_node, None, "{loose}");
        }
        assert!(Domain::read("<domain type='xen'/>").is_err());
        assert!(Domain::read("<domain type='kvm'><name>a</name></domain>").is_err());
    }

    #[test]
    fn a_domain_is_made_one_and_changed_back_byte_for_byte() {
        for xml in [DUMPED, INSTALLED] {
            let before = Domain::read(xml).expect("read");
            assert_eq!(restore(xml), Err(DomainError::NotOurs));
            let made = make(xml, 256 * M, 1024 * M).expect("made");
            let after = Domain::read(&made).expect("read");
            let growing = after.harvest.expect("a harvest VM");
            assert_eq!(growing.device.max_bytes, 768 * M);
            assert_eq!(before.name, after.name);
            assert_eq!(make(&made, 256 * M, 1024 * M).as_deref(), Ok(made.as_str()), "as it was");
            assert_ne!(made, xml);
            assert_eq!(restore(&made).expect("restored"), xml);
            assert_eq!(after.base_bytes, 256 * M);
        }
    }

    #[test]
    fn one_that_has_its_own_memory_devices_is_left_to_its_owner() {
        let xml = RUNNING.replace("<hecaton:vm ", "<hecaton:other ");
        let error = make(&xml, 256 * M, 1024 * M).expect_err("its own").to_string();
        assert!(error.contains("urn:hecaton:harvest:1"), "{error}");
    }
}
