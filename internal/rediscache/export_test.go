package rediscache

// For tests outside.
var (
	ReadEntry   = readEntry
	StagedEntry = stagedEntry
	Stamp       = stamp
	KeyOf       = keyOf
	OutcomeOf   = outcomeOf

	StageScript   = stageScript
	ConfirmScript = confirmScript
	FillScript    = fillScript
	DiscardScript = discardScript
)

// The parts of an entry.
const (
	MarkKind     = markKind
	HeaderSize   = headerSize
	DigestAt     = digestAt
	RevisionAt   = revisionAt
	RevisionSize = revisionSize
	TagAt        = tagAt
	TagPurpose   = purpose
)
