package feed

// Kept is how many scans are kept, and how many records they hold.
func (f *Feed) Kept() (scans, records int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.kept {
		s.mu.Lock()
		records += s.kept
		s.mu.Unlock()
	}
	return len(f.kept), records
}
