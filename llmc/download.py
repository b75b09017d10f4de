"""Files from the net, whole or not at all. get() and hub_files() read a local mirror instead with --local.

A checksum is a sha256, or git's sha1 of a file, which is what the hub knows of small ones. A file gets its name when
its size and checksum were found right; before, it is <name>.partial, which a later run goes on with. HF_ENDPOINT names
another hub; HF_TOKEN is sent to it, and to nobody it redirects to. Of several processes that want the same file one
downloads it and the others wait. A hub's names are joined to folders only where plain_name() allows it.
"""

import concurrent.futures
import fcntl
import hashlib
import http.client
import json
import os
import re
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request

from llmc.data_common import atomic_write, die, make_folder, plural, printable
from llmc.places import cache_folder

ATTEMPTS, PAUSE = 6, 1.0  # a try that brought some bytes does not count; pauses double
TIMEOUT = 30  # seconds of silence
BLOCK = 1 << 20
SHA1_LETTERS = 40
THREADS, RANKS = 4, 8  # downloads at a time in a process; processes that download
OFFLINE = "without a network, copy the files here and name their folder with --local"
REFUSED = None  # the hint where the server refuses, if another
REPORT = 30  # seconds between lines that say how far it is
LISTS = "lists of files"  # folder of the cache, by a name that no data set's owner can have
PAGE_BYTES, MOST_PAGES = 64 << 20, 10_000  # of a list of files
stopping = threading.Event()
received = 0  # bytes in this process, about


class Refused(Exception):
    """An answer that another try would not change. hint: what to do, where more is known than OFFLINE says."""

    def __init__(self, what, hint=None):
        super().__init__(what)
        self.hint = hint


def add_arguments(parser):
    parser.add_argument("--local", metavar="DIR", help="read the files from this folder instead of downloading them")
    add_cache_argument(parser)


def add_cache_argument(parser):
    cache = cache_folder()
    parser.add_argument("--cache", metavar="DIR", default=cache, help="where downloads are kept (%(default)s)")


def endpoint():
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def open_url(url, **headers):
    if not url.startswith(("http://", "https://")):  # urllib would open local files, too
        raise Refused("is no address of a web server")
    request = urllib.request.Request(url, headers={"User-Agent": "llm.cu", **headers})
    if url.startswith(endpoint() + "/") and os.environ.get("HF_TOKEN"):
        request.add_unredirected_header("Authorization", f"Bearer {os.environ['HF_TOKEN']}")
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as e:
        if e.code in (400, 401, 403, 404, 405, 410):
            raise Refused(f"the server answers {e.code} {e.reason}", hint_of_refusal(e, url)) from None
        raise


def hint_of_refusal(answer, url):
    """What to do where the hub refuses; None for other servers. It also answers 401 for a name that does not exist."""
    if not url.startswith(endpoint() + "/"):
        return None
    token = f"set HF_TOKEN to a token of yours ({endpoint()}/settings/tokens)"
    code = answer.headers.get("X-Error-Code")
    if code == "RevisionNotFound":
        return "name a branch, a tag or a commit that it has; main is the default"
    if code == "GatedRepo" or answer.code == 403:
        return f"it is gated: accept its terms on its page of {endpoint()}, and {token}"
    if code == "RepoNotFound" or answer.code == 401:
        return f"check the name; if it is right, it is private or gated: ask for access on its page, and {token}"
    return None


def retried(what, attempt):
    """attempt(progress) until it returns; a try that called progress() was not in vain."""
    failed = 0
    while True:
        moved = threading.Event()
        try:
            return attempt(moved.set)
        except Refused as e:
            die(f"{what}: {e}", REFUSED or e.hint or OFFLINE)
        except (OSError, http.client.HTTPException) as e:
            failed = 1 if moved.is_set() else failed + 1
            problem = str(getattr(e, "reason", None) or e) or type(e).__name__
            if failed == ATTEMPTS:
                hint = f"the same command goes on where this one stopped; {OFFLINE}"
                die(f"{what}: {problem}, {ATTEMPTS} times", hint)
            asked = e.headers.get("Retry-After", "") if isinstance(e, urllib.error.HTTPError) else ""
            pause = min(int(asked), 300) if asked.isdigit() else PAUSE * 2 ** (failed - 1)
            print(printable(f"{what}: {problem}; again in {pause:g} s"), file=sys.stderr, flush=True)
            if stopping.wait(pause):
                raise KeyboardInterrupt from None


def digest(path, like=""):
    """sha256 of a file; or git's sha1 where `like` is as long as one."""
    git = len(like) == SHA1_LETTERS
    h = hashlib.sha1(b"blob %d\0" % os.path.getsize(path)) if git else hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(BLOCK):
            h.update(block)
    return h.hexdigest()


class Partial:
    """<path>.partial, locked: what has come so far, and what is known about the whole."""

    def __init__(self, url, path, size, checksum):
        self.url, self.path, self.size, self.checksum = url, path, size, checksum
        self.name, self.tag, self.damaged = path + ".partial", None, 0
        follow_no_link = lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666)
        self.file = open(self.name, "ab", buffering=0, opener=follow_no_link)
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def write(self, block):
        view = memoryview(block)
        try:
            while view:
                view = view[self.file.write(view) :]
        except OSError as e:  # no fault of the network: another try would not help
            hint = "free some space and give the same command again, or name another folder with --cache"
            die(f"cannot write '{self.path}': {e.strerror}", hint)

    def attempt(self, progress):
        have = self.file.seek(0, os.SEEK_END)
        if self.size is None or have < self.size:
            have = self.receive(have, progress)
        if self.size not in (None, have):
            self.start_over(f"{have:,} bytes came instead of {self.size:,}")
        if self.checksum is not None and digest(self.name, self.checksum) != self.checksum:
            kind = "sha1" if len(self.checksum) == SHA1_LETTERS else "sha256"
            self.start_over(f"what came is damaged (its {kind} differs)")

    def start_over(self, why):
        self.file.truncate(0)
        self.damaged += 1
        raise (Refused if self.damaged == 3 else OSError)(why)

    def receive(self, have, progress):
        """Appends what is missing. Without a checksum nothing but the server's tag can say that two parts belong
        together."""
        if have and not (self.checksum or self.tag):
            self.file.truncate(have := 0)
        headers = {"Range": f"bytes={have}-"} | ({"If-Range": self.tag} if self.tag else {}) if have else {}
        try:
            answer = open_url(self.url, **headers)
        except urllib.error.HTTPError as e:
            if e.code == 416:  # nothing is missing
                return have
            raise
        with answer:
            tag = answer.headers.get("ETag", "")
            self.tag = tag if tag and not tag.startswith("W/") and not self.checksum else None
            part = answer.status == 206 and re.match(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
            if answer.status != 206:  # it sends the whole file
                self.file.truncate(have := 0)
            elif not part or int(part[1]) != have:
                raise OSError("the server sent another part than was asked for")
            length = answer.headers.get("Content-Length", "")
            total = int(part[2]) if part else int(length) if length.isdigit() else None
            while block := answer.read(BLOCK):
                if stopping.is_set():
                    raise KeyboardInterrupt
                self.write(block)
                have += len(block)
                global received
                received += len(block)
                progress()
                if self.size is not None and have > self.size:
                    return have
        if total is not None and have < total:
            raise OSError(f"the connection ended after {have:,} of {total:,} bytes")
        return have


def is_there(path, size):
    return os.path.exists(path) and size in (None, os.path.getsize(path))


def fetch(url, path, size=None, checksum=None):
    """Downloads url to path and returns path. A file that is there with the right size is kept: it was checked when it
    came."""
    if is_there(path, size):
        return path
    make_folder(os.path.dirname(path) or ".")
    try:
        partial = Partial(url, path, size, checksum)
        with partial.file:
            if not is_there(path, size):  # else: another process was faster
                retried(f"download of {url}", partial.attempt)
                os.fsync(partial.file.fileno())
                os.replace(partial.name, path)
    except OSError as e:
        die(f"cannot write '{path}': {e.strerror or e}", "name another folder with --cache")
    return path


def get(url, args, sha256=None):
    """One file. The cache keeps it under its whole URL, because many are called test.jsonl; so may a mirror, or by its
    name alone."""
    parts = urllib.parse.urlparse(url)
    whole = os.path.join(parts.netloc, urllib.parse.unquote(parts.path).lstrip("/"))
    if not args.local:
        return fetch(url, os.path.join(args.cache, whole), checksum=sha256)
    for path in os.path.join(args.local, whole), os.path.join(args.local, os.path.basename(whole)):
        if os.path.isfile(path):
            return path
    die(f"'{args.local}' does not hold {os.path.basename(whole)}", f"--local names a folder with the file of {url}")


# ---- data sets on the Hugging Face hub


def plain_name(name):
    """Whether a name that came from outside stays below the folder it is joined to, and is printed as it is."""
    return isinstance(name, str) and name.isprintable() and not {"", ".", ".."} & set(name.split("/"))


def checked_list(revision, files, licence=None):
    """What it was given, or ValueError: for a list from the net or from a file."""
    if not isinstance(revision, str) or not re.fullmatch(r"[\w.-]+", revision):
        raise ValueError(f"it names the revision {str(revision)[:200]!a}")
    for path, size, checksum in files:
        if not plain_name(path):
            raise ValueError(f"it names {str(path)[:200]!a}, which is no file of a folder")
        if type(size) is not int or size < 0 or not isinstance(checksum, str | None):
            raise ValueError(f"size or checksum of {path} make no sense")
    return revision, files, printable(licence.replace("\n", "?")) if isinstance(licence, str) else None


def licence_of(info):
    """The licence that a repository's page states, or None. info: the hub's answer about it."""
    tags = [tag.partition(":")[2] for tag in info.get("tags") or () if str(tag).startswith("license:")]
    return ", ".join(tags)[:100] or None


def checksum_of(file):
    """sha256 of a large file, git's sha1 of a small one."""
    known = file.get("lfs", {}).get("oid") or file.get("oid")
    return known if isinstance(known, str) and re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", known) else None


def hub_list(repo, folder, kind="datasets", revision="main", below=False):
    """(revision, [(path in the repository, size, checksum or None)], licence or None) of a folder as it is now; kind:
    datasets or models. below: with the folders in it."""

    def page(url):
        def ask(progress):
            with open_url(url) as answer:
                text = answer.read(PAGE_BYTES)
                if len(text) == PAGE_BYTES:
                    raise ValueError(f"a page of it has more than {PAGE_BYTES >> 20} MiB")
                if answer.length:
                    raise http.client.IncompleteRead(text, answer.length)
                return json.loads(text), re.search(r'<([^>]*)>;\s*rel="next"', answer.headers.get("Link", ""))

        return retried(f"list of {repo}", ask)

    try:
        info = page(f"{endpoint()}/api/{kind}/{repo}/revision/{revision}")[0]
        revision, _, licence = checked_list(info["sha"], [], licence_of(info))
        where = f"{endpoint()}/api/{kind}/{repo}/tree/{revision}/{urllib.parse.quote(folder)}".rstrip("/")
        files, link = page(where + "?recursive=true" * below)
        pages = set()
        while link:
            if link[1] in pages or len(pages) == MOST_PAGES:
                raise ValueError(f"it does not end after {plural(len(pages) + 1, 'page')}")
            pages.add(link[1])
            more, link = page(link[1])
            files += more
        files = [(f["path"], f["size"], checksum_of(f)) for f in files if f["type"] == "file"]
        return checked_list(revision, sorted(files), licence)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        what = f"the list of {repo} is not what the hub's interface promises: {e}"
        die(what, f"is {endpoint()} a Hugging Face hub? " + OFFLINE)


def spelt(suffix):
    return "*" + " *".join((suffix,) if isinstance(suffix, str) else suffix)


def mirrored(repo, folder, suffix, local):
    for place in (os.path.join(local, repo, folder), os.path.join(local, folder), local):
        names = sorted(n for n in os.listdir(place) if n.endswith(suffix)) if os.path.isdir(place) else []
        if names:
            return [os.path.join(place, n) for n in names]
    hint = f"it must hold the files of {repo}/{folder}, under their paths on the hub or all in one folder"
    die(f"'{local}' holds no {spelt(suffix)}", hint)


def listed(repo, folder, listing, revision):
    """hub_list(), kept in a file: what was listed once stays that revision."""
    try:
        with open(listing) as f:
            return checked_list(*json.load(f))
    except (OSError, ValueError, TypeError):
        found = hub_list(repo, folder, revision=revision, below=True)
        make_folder(os.path.dirname(listing))
        atomic_write(listing, json.dumps(found, indent=1).encode())
        return found


def hub_files(repo, folder, suffix, args, ranks=None):
    """Paths of all files with this suffix (or one of a tuple) in a folder of a data set. A mirror holds them under
    their paths on the hub, or directly in --local. ranks: several processes (shards.py) that share the work and the
    cache."""
    if args.local:
        return mirrored(repo, folder, suffix, args.local)
    return hub_set(repo, folder, lambda path: path.endswith(suffix), spelt(suffix), args.cache, ranks)


def hub_set(repo, folder, wanted, what, cache, ranks=None, revision=None):
    """Paths of the files in a folder of a data set, and below it, for which wanted(path in the repository) is true.
    what: says in a message what is wanted. revision: None is main as it was when it was first listed; to look for a
    newer one delete cache/lists of files/<repo>/<folder>/files.json."""
    name, found = repo + (f"@{revision}" if revision else ""), None
    base, listing = os.path.join(cache, name), os.path.join(cache, LISTS, name, folder, "files.json")
    if not ranks or ranks.rank == 0:
        found = listed(repo, folder, listing, revision or "main")
        print(f"{repo}: revision {found[0]}, licence: {found[2] or 'see its page'}; {endpoint()}/datasets/{repo}")
    revision, files, _ = ranks.share(found) if ranks else found
    files = [f for f in files if wanted(f[0])]
    if not files:
        die(f"{repo}/{folder} has no {what}", "has the data set moved? Look at its page on the hub")
    mine = files if not ranks else files[ranks.rank :: min(ranks.size, RANKS)] if ranks.rank < RANKS else []
    wanted = [f for f in mine if not is_there(os.path.join(base, f[0]), f[1])]
    total = sum(f[1] for f in wanted)
    if wanted:
        some = f"{len(wanted)} of {plural(len(files), 'file')}"
        print(f"downloading {some}, {total / 1e9:.2f} GB, from {repo}", flush=True)

    def one(file):
        path, size, checksum = file
        url = f"{endpoint()}/datasets/{repo}/resolve/{revision}/{urllib.parse.quote(path)}"
        fetch(url, os.path.join(base, path), size, checksum)
        print(f"  {path}: {size / 1e6:,.1f} MB", flush=True)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        try:
            waiting = [pool.submit(one, f) for f in wanted]
            while waiting:
                done, waiting = concurrent.futures.wait(waiting, REPORT, concurrent.futures.FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if waiting:
                    print(f"  {received / 1e9:.2f} of {total / 1e9:.2f} GB", flush=True)
        except BaseException:  # the other threads end soon, too
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if ranks:
        ranks.gather(None)  # all files are there
    return [os.path.join(base, f[0]) for f in files]
